// The list of chats, search, undo and import, beyond what htmx does. Everything works without it.
"use strict";

(() => {
  // -- Menus in the list: one at a time; Escape puts the title back; F2 opens a chat's menu.

  const closeMenu = (menu) => {
    const title = menu.querySelector(".chat-menu__title");
    title.value = title.defaultValue;
    menu.open = false;
  };

  document.addEventListener(
    "toggle",
    (event) => {
      const menu = event.target;
      if (!menu.matches?.(".chat-menu") || !menu.open) return;
      for (const other of document.querySelectorAll(".chat-menu[open]")) {
        if (other !== menu) closeMenu(other);
      }
      menu.scrollIntoView({ block: "nearest" });
    },
    true, // it does not bubble
  );

  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll(".chat-menu[open]")) {
      if (!menu.contains(event.target)) closeMenu(menu);
    }
  });

  const openMenu = (item) => {
    const menu = item.querySelector(".chat-menu");
    menu.open = true;
    menu.querySelector(".chat-menu__title").select();
  };

  // Before the page's own keys: Escape in here must not stop an answer.
  document.addEventListener(
    "keydown",
    (event) => {
      if (event.isComposing) return;
      const menu = event.target.closest?.(".chat-menu[open]");
      if (event.key === "Escape" && menu) {
        closeMenu(menu);
        menu.querySelector("summary").focus();
        event.stopPropagation();
      } else if (event.key === "Escape" && event.target.matches?.(".search-box__input")) {
        event.stopPropagation();
        if (!event.target.value) return;
        event.preventDefault();
        event.target.value = "";
        event.target.dispatchEvent(new Event("input", { bubbles: true }));
      } else if (event.key === "F2" && event.target.matches?.(".chat-list__link")) {
        event.preventDefault();
        openMenu(event.target.parentElement);
      }
    },
    true,
  );

  // -- Focus: what had it may be gone with the old list.

  let acted = null;

  document.addEventListener("submit", (event) => {
    const [, chat] = event.target.action.match(/(\/chats\/[0-9a-f]+)\/(?:rename|pin|delete|undo)$/) ?? [];
    acted = chat ?? null;
  });

  document.addEventListener("htmx:after:swap", () => {
    if (acted === null || document.activeElement !== document.body) return;
    const link = document.querySelector(`.chat-list__link[href="${acted}"]`);
    // In a narrow window the list closes when the focus leaves it.
    const narrow = matchMedia("(max-width: 52rem)").matches;
    const undo = narrow ? null : document.querySelector(".undo__item button");
    const list = document.getElementById("chat-list");
    const next = link?.parentElement.querySelector("summary") ?? undo;
    (next ?? list?.querySelector("summary"))?.focus();
    acted = null;
  });

  // -- Undo: offered as long as the server keeps the chat.

  const timed = new WeakSet();

  const watchUndo = () => {
    for (const item of document.querySelectorAll(".undo__item")) {
      if (timed.has(item)) continue;
      timed.add(item);
      setTimeout(() => item.remove(), Number(item.dataset.leftMs));
    }
  };

  // -- Import: a file that is too large is refused before it is sent.

  document.addEventListener("change", (event) => {
    const field = event.target;
    if (!field.matches?.("input[type=file][data-max-bytes]")) return;
    const size = field.files[0]?.size ?? 0;
    field.setCustomValidity(size > Number(field.dataset.maxBytes) ? field.dataset.maxText : "");
    field.reportValidity();
  });

  const begin = () => {
    watchUndo();
    const undo = document.getElementById("undo");
    if (undo) new MutationObserver(watchUndo).observe(undo, { childList: true });
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
