// One conversation: copying, asking otherwise, drafts.
"use strict";

(() => {
  const COPIED_MS = 1_500;
  const DRAFT_DELAY_MS = 250;
  const DRAFT_DAYS = 30;
  const byId = (id) => document.getElementById(id);

  // -- Copy a message exactly as it is stored.

  const storedText = async (id) => {
    const response = await fetch(`/messages/${id}/text`);
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    return response.text();
  };

  const copyMessage = async (id) => {
    const text = storedText(id);
    if (!navigator.clipboard?.write || !window.ClipboardItem) return rejoinder.copy(await text);
    // The promise goes in, so that the click still counts when the text has come.
    const blob = text.then((words) => new Blob([words], { type: "text/plain" }));
    return navigator.clipboard.write([new ClipboardItem({ "text/plain": blob })]);
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.(".message__copy");
    if (!button) return;
    try {
      await copyMessage(button.closest(".message").id.replace("message-", ""));
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not copied";
    }
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  });

  // -- Menus and the field to ask otherwise: these open and close in place.

  const OPEN = ".edit[open], .compare[open]";

  const close = (details) => {
    details.open = false;
    details.querySelector("summary").focus();
    const field = details.querySelector(".edit__text");
    if (field) field.value = field.defaultValue;
  };

  const writeIn = (field) => {
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
    field.scrollIntoView({ block: "nearest" });
  };

  // The field is fetched when it is first asked for, and is there from then on.
  rejoinder.onContent((root) => {
    const [field] = rejoinder.all(root, ".edit__text").filter((one) => one.closest(".edit[open]"));
    if (field) writeIn(field);
  });

  document.addEventListener(
    "toggle",
    (event) => {
      const field = event.target.open && event.target.querySelector?.(".edit__text");
      if (field) writeIn(field);
    },
    true,
  );

  document.addEventListener("click", (event) => {
    const cancelled = event.target.closest?.(".edit__cancel");
    if (cancelled) close(cancelled.closest(".edit"));
    const menu = document.querySelector(".compare[open]");
    if (menu && !menu.contains(event.target)) menu.open = false;
  });

  document.addEventListener(
    "keydown",
    (event) => {
      if (event.isComposing) return;
      const open = event.target.closest?.(OPEN) ?? document.querySelector(OPEN);
      if (event.key === "Escape" && open) {
        event.preventDefault();
        close(open);
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        if (!event.target.matches?.(".edit__text")) return;
        event.preventDefault();
        open.querySelector(".edit__send")?.click();
      }
    },
    true,
  );

  // -- Another version appears where the one before was; new answers are at the end.

  const conversation = () => byId("conversation");
  let place = null; // the button that was pressed, and where

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.(".branch button, .choice__take");
    if (button) place = { id: button.id, top: button.getBoundingClientRect().top };
  });

  const backToPlace = () => {
    if (!place) return;
    const button = byId(place.id) ?? document.querySelector(".choice__chosen");
    if (!button) return;
    conversation().scrollTop += button.getBoundingClientRect().top - place.top;
    if (!button.disabled) return;
    button.parentElement.querySelector("button:not([disabled])")?.focus({ preventScroll: true });
  };

  const toTheEnd = () => {
    const box = conversation();
    box.scrollTop = box.scrollHeight;
    box.dispatchEvent(new Event("scroll")); // nothing to scroll is the end, too
  };

  document.addEventListener("htmx:after:swap", (event) => {
    const { action = "", method } = event.detail.ctx?.request ?? {};
    if (method !== "POST") return;
    const [, what] = action.match(/^\/messages\/[0-9a-f]+\/(\w+)$/) ?? [];
    if (!what) return;
    requestAnimationFrame(what === "select" ? backToPlace : toTheEnd);
  });

  // -- What needs scripts is shown only with them; nothing is shown twice.

  rejoinder.onContent((root) => {
    for (const button of rejoinder.all(root, ".message__copy, .edit__cancel")) button.hidden = false;
    for (const message of rejoinder.all(root, ".message, .candidates")) {
      // What a stream brings at its end may be on the page already, from an answer to a form.
      for (const other of document.querySelectorAll(`[id="${message.id}"]`)) {
        if (other !== message && message.isConnected) other.remove();
      }
    }
  });

  // -- Drafts: what is written stays with its chat, until it was sent.

  const PREFIX = "rejoinder:draft:";
  const composer = () => byId("composer-text");
  const key = () => PREFIX + (byId("chat")?.dataset.chatId ?? "new");
  let due = null;

  const keep = () => {
    clearTimeout(due);
    due = null;
    const text = composer()?.value ?? "";
    try {
      if (text.trim()) localStorage.setItem(key(), JSON.stringify({ text, at: Date.now() }));
      else localStorage.removeItem(key());
    } catch {
      // No room, or no storage allowed: the text is still in the field.
    }
  };

  const drop = (name = key()) => {
    clearTimeout(due);
    due = null;
    try {
      localStorage.removeItem(name);
    } catch {
      // No storage, no draft.
    }
  };

  const drafts = () => {
    try {
      return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
    } catch {
      return [];
    }
  };

  const draft = (name) => {
    try {
      return JSON.parse(localStorage.getItem(name)) ?? {};
    } catch {
      return {};
    }
  };

  const restore = () => {
    for (const name of drafts()) {
      const { at = 0 } = draft(name);
      if (Date.now() - at > DRAFT_DAYS * 86_400_000) drop(name);
    }
    const field = composer();
    if (field && !field.value) field.value = draft(key()).text ?? "";
  };

  document.addEventListener("input", (event) => {
    if (event.target !== composer()) return;
    clearTimeout(due);
    due = setTimeout(keep, DRAFT_DELAY_MS);
  });
  addEventListener("pagehide", () => due !== null && keep());

  document.addEventListener("htmx:after:request", (event) => {
    const { sourceElement, request, response } = event.detail.ctx;
    if (request.method !== "POST" || !response || response.status >= 400) return;
    const deleted = request.action.match(/^\/chats\/([0-9a-f]+)\/delete$/);
    if (deleted) drop(PREFIX + deleted[1]);
    const carried = request.action.endsWith("/carry-over");
    if (sourceElement.id === "composer" || carried) drop();
  });
  // A field that was swapped in has what came back from the queue, or nothing.
  document.addEventListener("htmx:after:settle", (event) => {
    if (event.detail.newContent.some((node) => node.id === "composer-text")) keep();
  });

  rejoinder.whenReady(restore);
})();
