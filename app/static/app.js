// What the pages do beyond htmx. No inline code, no eval: the policy forbids both.
"use strict";

(() => {
  const VISIBLE = "rejoinder:visible";
  const WARM_AGAIN_MS = 60_000;
  const NEAR_END_PX = 48;
  const streams = "[hx-sse\\:connect]";

  const cookie = (name) =>
    document.cookie
      .split("; ")
      .find((pair) => pair.startsWith(`${name}=`))
      ?.slice(name.length + 1) ?? "";

  // -- Requests: the token is read when it is sent, so an old page outlives a new sign-in.

  document.addEventListener("htmx:config:request", (event) => {
    const request = event.detail.ctx.request;
    if (request.method !== "GET") request.headers["x-csrftoken"] = cookie("rejoinder_csrf");
  });

  // -- Problems that the server cannot tell itself.

  const tell = (text, hint = "") => {
    const box = document.createElement("div");
    box.className = "problem";
    for (const [part, words] of [["text", text], ["hint", hint]]) {
      if (!words) continue;
      const line = document.createElement("p");
      line.className = `problem__${part}`;
      line.textContent = words;
      box.append(line);
    }
    document.getElementById("notice")?.replaceChildren(box);
  };

  document.addEventListener("htmx:error", (event) => {
    const ctx = event.detail.ctx;
    if (ctx?.request?.method !== "POST" || ctx.response) return;
    tell("The server cannot be reached.", "What you wrote is still here. Try again in a moment.");
  });

  // -- Streams: connect while the page is seen; give up when the server says 4xx.

  const refused = new WeakSet();

  const connect = () => {
    if (document.visibilityState !== "visible") return;
    for (const element of document.querySelectorAll(streams)) {
      if (!refused.has(element)) element.dispatchEvent(new CustomEvent(VISIBLE));
    }
  };

  document.addEventListener("htmx:sse:error", (event) => {
    const status = event.detail.status ?? 0;
    if (status >= 400 && status < 500) refused.add(event.target);
    event.target.classList?.add("message--unreachable");
  });
  document.addEventListener("htmx:sse:before:connection", (event) => {
    if (refused.has(event.target)) event.preventDefault();
  });
  document.addEventListener("htmx:sse:after:connection", (event) => {
    event.target.classList.remove("message--unreachable");
  });

  // -- Warm: bring the chat's state back while its reader reads.

  let warmedAt = -Infinity;

  const warm = () => {
    const url = document.getElementById("chat")?.dataset.warmUrl;
    const idle = !document.querySelector(streams);
    if (!url || !idle || document.visibilityState !== "visible") return;
    if (performance.now() - warmedAt < WARM_AGAIN_MS) return;
    warmedAt = performance.now();
    fetch(url, {
      method: "POST",
      headers: { "x-csrftoken": cookie("rejoinder_csrf") },
      body: new URLSearchParams(),
    }).catch(() => {}); // the message itself will do the work
  };

  // -- Scrolling: stay at the end unless the reader has gone up.

  let pinned = true;
  let jump = null;
  const scroller = () => document.getElementById("conversation");

  const toEnd = () => {
    const box = scroller();
    if (box) box.scrollTop = box.scrollHeight;
  };

  const showJump = () => {
    if (!pinned && !jump) {
      jump = document.createElement("button");
      jump.type = "button";
      jump.className = "button button--small jump";
      jump.textContent = "To the end";
      jump.addEventListener("click", () => {
        pinned = true;
        toEnd();
        showJump();
      });
      document.getElementById("composer")?.append(jump);
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
        if (fromEnd < NEAR_END_PX) pinned = true;
        else if (box.scrollTop < lastTop) pinned = false;
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
  };

  // -- Keys: Enter sends, Shift+Enter is a new line, Escape stops the answer.

  const hasKeyboard = matchMedia("(hover: hover), (pointer: fine)");

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

  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches?.(".composer__text")) send(event);
    if (event.key !== "Escape" || event.isComposing) return;
    const menu = document.querySelector(".chat-menu[open]");
    if (menu) {
      menu.open = false;
      menu.querySelector("summary").focus();
    } else {
      document.querySelector(".message--running .message__stop")?.click();
    }
  });

  // -- Narrow windows: the list of chats on demand.

  document.addEventListener("click", (event) => {
    const toggle = event.target.closest?.(".topbar__toggle");
    if (!toggle) return;
    const shown = document.querySelector(".layout").classList.toggle("layout--chats");
    toggle.setAttribute("aria-expanded", String(shown));
  });

  // -- Times in the reader's zone.

  const whenFormat = new Intl.DateTimeFormat(undefined, {
    dateStyle: "medium",
    timeStyle: "medium",
  });

  const localTimes = (root) => {
    for (const time of root.querySelectorAll("time[datetime]:not([title])")) {
      const when = new Date(time.dateTime);
      if (Number.isNaN(when.getTime())) continue;
      time.title = time.textContent.trim();
      time.textContent = whenFormat.format(when);
      const column = time.closest("td")?.cellIndex;
      const heading = time.closest("table")?.tHead?.rows[0].cells[column];
      if (heading) heading.textContent = heading.textContent.replace(" (UTC)", "");
    }
  };

  // -- Copy buttons on finished code.

  const copy = async (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea"); // plain HTTP beyond this machine
    area.className = "visually-hidden";
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) throw new Error("copying was refused");
  };

  const copyButtons = (root) => {
    for (const code of root.querySelectorAll(".answer:not(.answer--open) .code")) {
      if (code.querySelector(".code__copy")) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "button button--small code__copy";
      button.textContent = "Copy";
      code.append(button);
    }
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.(".code__copy");
    if (!button) return;
    try {
      await copy(button.parentElement.querySelector("code").textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not copied";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });

  // -- Tabs in step: one that changed something tells the others; each looks again when it is seen.

  const LOOK_AGAIN_MS = 5_000;
  const tabs = new BroadcastChannel("rejoinder");
  let hiddenAt = null;
  let outdated = false;
  let looking = false;

  const messageStates = (root) =>
    Array.from(root.querySelectorAll(".message"), (one) => `${one.id} ${one.dataset.status ?? ""}`).join();

  const take = (fresh, id) => {
    const [old, made] = [document.getElementById(id), fresh.getElementById(id)];
    if (!old || !made) return;
    old.replaceWith(document.adoptNode(made));
    htmx.process(made);
  };

  const lookAgain = async () => {
    if (looking || document.visibilityState !== "visible") return;
    [looking, outdated] = [true, false];
    try {
      const response = await fetch(location.pathname, { headers: { Accept: "text/html" } });
      if (response.ok) {
        const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
        if (!document.querySelector(".chat-menu[open]")) take(fresh, "chat-list");
        const title = fresh.getElementById("chat-title");
        if (title) document.getElementById("chat-title").textContent = title.textContent;
        const talk = scroller();
        const newTalk = fresh.getElementById("conversation");
        if (talk && newTalk && messageStates(talk) !== messageStates(newTalk)) {
          talk.replaceChildren(...newTalk.children);
          htmx.process(talk);
        }
        take(fresh, "composer-controls");
        dress();
      } else if (response.status === 404) {
        tell("This chat was deleted.");
      }
    } catch {
      outdated = true; // offline; the next look will tell
    } finally {
      looking = false;
    }
    if (outdated) setTimeout(lookAgain, LOOK_AGAIN_MS);
  };

  tabs.addEventListener("message", () => {
    outdated = true;
    lookAgain();
  });

  // A link to the chat that is shown already brings it up to date, so that typed text stays.
  document.addEventListener("click", async (event) => {
    const link = event.target.closest?.(".problem__link a");
    if (!link || link.pathname !== location.pathname || !scroller()) return;
    if (event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    await lookAgain();
    if (!outdated) document.getElementById("notice").replaceChildren();
    document.getElementById("composer-text")?.focus();
  });

  // One that leads to a new chat takes the text along that this chat has no room for.
  const DRAFT = "rejoinder:draft";

  document.addEventListener("click", (event) => {
    const link = event.target.closest?.(".problem__link a");
    const text = document.getElementById("composer-text")?.value;
    if (link?.pathname === "/" && text) sessionStorage.setItem(DRAFT, text);
  });

  const takeDraft = () => {
    const field = document.querySelector(".composer--new .composer__text");
    if (!field) return;
    field.value ||= sessionStorage.getItem(DRAFT) ?? "";
    sessionStorage.removeItem(DRAFT);
  };

  const tellTabs = () => tabs.postMessage("changed");

  document.addEventListener("htmx:after:request", (event) => {
    const { request, response } = event.detail.ctx;
    if (request.method === "POST" && response.status < 400) tellTabs();
  });

  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "hidden") hiddenAt = performance.now();
    else if (outdated || performance.now() - (hiddenAt ?? Infinity) > LOOK_AGAIN_MS) lookAgain();
  });

  // -- Begin, and again after each piece of new HTML.

  const dress = () => {
    localTimes(document);
    copyButtons(document);
  };

  document.addEventListener("htmx:after:swap", dress);
  document.addEventListener("htmx:after:process", () => setTimeout(connect)); // listeners are set
  document.addEventListener("visibilitychange", () => {
    connect();
    warm();
  });
  addEventListener("online", connect);

  const begin = () => {
    dress();
    takeDraft();
    watchScrolling();
    connect();
    warm();
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
