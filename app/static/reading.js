// Reading and getting around: scrolling, keys, the list of chats in narrow windows.
"use strict";

(() => {
  const NEAR_END_PX = 48;
  const byId = (id) => document.getElementById(id);

  // -- Scrolling: stay at the end unless the reader has gone up.

  let pinned = true;
  let jump = null;
  const scroller = () => byId("conversation");

  const toEnd = () => {
    const box = scroller();
    if (box) box.scrollTop = box.scrollHeight;
  };

  const showJump = () => {
    if (!pinned && !jump) {
      jump = document.createElement("button");
      jump.type = "button";
      jump.className = "button button--small jump";
      jump.textContent = "Jump to the end";
      jump.addEventListener("click", () => {
        pinned = true;
        toEnd();
        showJump();
        byId("composer-text")?.focus({ preventScroll: true });
      });
      byId("composer")?.append(jump);
    } else if (pinned && jump) {
      jump.remove();
      jump = null;
    }
  };

  const watchScrolling = () => {
    const box = scroller();
    if (!box) return;
    let lastTop = box.scrollTop;
    box.addEventListener(
      "scroll",
      () => {
        const fromEnd = box.scrollHeight - box.clientHeight - box.scrollTop;
        // Any step up lets go, however small; content that shrinks leaves the box at its end.
        if (fromEnd <= 1) pinned = true;
        else if (box.scrollTop < lastTop) pinned = false;
        else if (box.scrollTop > lastTop && fromEnd < NEAR_END_PX) pinned = true;
        lastTop = box.scrollTop;
        showJump();
      },
      { passive: true },
    );
    const follow = () => pinned && toEnd();
    new MutationObserver(follow).observe(box, {
      childList: true,
      subtree: true,
      characterData: true,
    });
    new ResizeObserver(follow).observe(box);
    if (!location.hash) toEnd();
    else pinned = false;
  };

  // -- The list of chats comes over a narrow page when it is asked for.

  const layout = () => document.querySelector(".layout");
  const listIsOpen = () => Boolean(layout()?.classList.contains("layout--chats"));

  const showList = (shown) => {
    const toggle = document.querySelector(".topbar__toggle");
    if (!toggle || listIsOpen() === shown) return;
    const inside = byId("sidebar").contains(document.activeElement);
    layout().classList.toggle("layout--chats", shown);
    toggle.setAttribute("aria-expanded", String(shown));
    if (shown) byId("sidebar").querySelector("input, a, button, summary")?.focus();
    else if (inside) toggle.focus();
  };

  // It covers the page, so it goes when the focus leaves it.
  document.addEventListener("focusin", (event) => {
    if (listIsOpen() && !event.target.closest("#sidebar, .topbar")) showList(false);
  });

  document.addEventListener("click", (event) => {
    if (event.target.closest?.(".topbar__toggle")) showList(!listIsOpen());
    else if (listIsOpen() && event.target === layout()) showList(false); // beside the list
  });
  matchMedia("(max-width: 52rem)").addEventListener("change", () => showList(false));

  // -- Keys. The list of them is the dialog in base.html.

  const isMac = /mac|iphone|ipad/i.test(navigator.userAgentData?.platform ?? navigator.platform);
  const hasKeyboard = matchMedia("(hover: hover), (pointer: fine)");
  const isField = (element) =>
    Boolean(element.closest?.("textarea, select, [contenteditable], input:not([type=radio])"));

  const send = (event) => {
    if (event.shiftKey || event.isComposing) return;
    const chord = event.ctrlKey || event.metaKey;
    if (!chord && !hasKeyboard.matches) return;
    event.preventDefault();
    const form = event.target.form;
    const button = form.querySelector(".composer__send");
    if (!button || button.disabled || !event.target.value.trim()) return;
    pinned = true;
    form.requestSubmit(button);
  };

  const stop = () => {
    const button = document.querySelector(".message--running .message__stop");
    if (button && !button.form.classList.contains("htmx-request")) button.click();
  };

  const search = () => {
    const field = document.querySelector('.sidebar input[type="search"]');
    if (!field) return false;
    if (getComputedStyle(byId("sidebar")).visibility === "hidden") showList(true);
    field.focus();
    field.select();
    return true;
  };

  const goToChat = (step) => {
    const links = [...document.querySelectorAll(".chat-list__link")];
    const at = links.findIndex((link) => link.hasAttribute("aria-current"));
    const next = at < 0 ? links[0] : links[at + step];
    next?.click();
    return Boolean(next);
  };

  const showShortcuts = () => {
    const dialog = byId("shortcuts");
    if (dialog.open) dialog.close();
    else dialog.showModal();
    return true;
  };

  const goBack = () => {
    const menu = document.querySelector(".chat-menu[open]");
    if (menu) {
      menu.open = false;
      menu.querySelector("summary").focus();
    } else if (listIsOpen()) showList(false);
    else stop();
  };

  // Each returns whether it did something; then the browser does nothing of its own.
  const shortcut = (event) => {
    const { key, altKey, ctrlKey, metaKey, shiftKey } = event;
    const command = isMac ? metaKey && !ctrlKey : ctrlKey && !metaKey;
    if (command && shiftKey && !altKey && key.toLowerCase() === "o") {
      document.querySelector(".topbar__new").click();
      return true;
    }
    if (command && !shiftKey && !altKey && key.toLowerCase() === "k") return search();
    if (altKey && !ctrlKey && !metaKey && !shiftKey) {
      if (key === "ArrowUp") return goToChat(-1);
      if (key === "ArrowDown") return goToChat(1);
    }
    if (key === "Escape" && shiftKey) {
      byId("composer-text")?.focus();
      return true;
    }
    if (key === "?" && !ctrlKey && !metaKey && !altKey && !isField(event.target)) {
      return showShortcuts();
    }
    return false;
  };

  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.defaultPrevented) return;
    const dialog = document.querySelector("dialog[open]");
    if (dialog && event.key !== "?") return; // it closes on Escape by itself
    if (event.key === "Enter" && event.target.matches?.(".composer__text")) send(event);
    else if (shortcut(event)) event.preventDefault();
    else if (event.key === "Escape") goBack();
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest?.(".topbar__help")) showShortcuts();
    else if (event.target.matches?.("dialog[open]")) event.target.close(); // beside it
  });

  // -- A link to a new chat takes the text along that this chat has no room for.

  const DRAFT = "rejoinder:draft";

  document.addEventListener("click", (event) => {
    const link = event.target.closest?.(".problem__link a");
    const text = byId("composer-text")?.value;
    if (link?.pathname === "/" && text) sessionStorage.setItem(DRAFT, text);
  });

  const takeDraft = () => {
    const field = document.querySelector(".composer--new .composer__text");
    if (!field) return;
    field.value ||= sessionStorage.getItem(DRAFT) ?? "";
    sessionStorage.removeItem(DRAFT);
  };

  rejoinder.whenReady(() => {
    takeDraft();
    watchScrolling();
    if (isMac) for (const key of document.querySelectorAll(".key--command")) key.textContent = "⌘";
  });
})();
