// Running answers: who is connected when, and how pages of one chat keep in step.
"use strict";

(() => {
  const VISIBLE = "rejoinder:visible";
  const CHECK_MS = 5_000;
  const SILENCE_MS = 25_000; // the server says something every 10 s
  const WARM_AGAIN_MS = 60_000;
  const LOOK_AGAIN_MS = 5_000;
  const STREAMS = "[hx-sse\\:connect]";

  const seen = () => document.visibilityState === "visible";

  // -- Connect while the page is seen; give up when the server says 4xx.

  const refused = new WeakSet();
  const connections = new Map(); // running message -> its connection, and when it was last heard

  const connect = () => {
    if (!seen()) return;
    for (const element of document.querySelectorAll(STREAMS)) {
      if (!refused.has(element)) element.dispatchEvent(new CustomEvent(VISIBLE));
    }
  };

  const heard = (element, connection) => {
    if (connection) connections.set(element, { connection, at: Date.now() });
  };

  document.addEventListener("htmx:sse:before:connection", (event) => {
    if (refused.has(event.target)) event.preventDefault();
    else heard(event.target, event.detail.connection);
  });
  document.addEventListener("htmx:sse:after:connection", (event) => {
    heard(event.target, event.detail.connection);
    event.target.classList.remove("message--unreachable");
  });
  document.addEventListener("htmx:sse:before:message", (event) => {
    heard(event.target, event.detail.connection);
  });
  document.addEventListener("htmx:sse:error", (event) => {
    const status = event.detail.status ?? 0;
    if (status >= 400 && status < 500) {
      refused.add(event.target);
      event.target.classList?.add("message--refused");
    }
    event.target.classList?.add("message--unreachable");
  });
  document.addEventListener("htmx:sse:close", (event) => connections.delete(event.target));

  // After sleep a connection may be dead without a sign of it; a server that was away is back.
  const check = () => {
    if (!seen()) return;
    for (const [element, { connection, at }] of connections) {
      if (!element.isConnected) connections.delete(element);
      else if (Date.now() - at > SILENCE_MS) {
        heard(element, connection);
        connection.reader?.cancel();
      }
    }
    connect();
  };
  setInterval(check, CHECK_MS);

  const retryNow = () => {
    for (const { connection } of connections.values()) connection.delayCanceller?.();
    check();
  };
  addEventListener("online", retryNow);

  // -- Warm: bring the chat's state back while its reader reads.

  let warmedAt = -Infinity;

  const warm = () => {
    const url = document.getElementById("chat")?.dataset.warmUrl;
    const idle = !document.querySelector(STREAMS);
    if (!url || !idle || !seen()) return;
    if (performance.now() - warmedAt < WARM_AGAIN_MS) return;
    warmedAt = performance.now();
    rejoinder.post(url).catch(() => {}); // the message itself will do the work
  };

  // -- In step: a tab that changed something tells the others; each looks again when it is seen.
  //    Other browsers' changes show when the reader comes back to the page.

  const tabs = new BroadcastChannel("rejoinder");
  const conversation = () => document.getElementById("conversation");
  let lookedAt = Date.now();
  let version = ""; // of the page that was looked at last
  let outdated = false;
  let looking = false;

  const messageStates = (root) =>
    Array.from(root.querySelectorAll(".message, .branch"), (one) => {
      const { htmxPowered, ...state } = one.dataset;
      return one.id + JSON.stringify(state) + (one.matches(".branch") ? one.textContent : "");
    }).join();

  const take = (fresh, id) => {
    const [old, made] = [document.getElementById(id), fresh.getElementById(id)];
    if (!old || !made || old.isEqualNode(made)) return;
    old.replaceWith(document.adoptNode(made));
    htmx.process(made);
    rejoinder.dress(made);
  };

  const takePage = (fresh) => {
    if (!document.querySelector(".chat-menu[open]")) take(fresh, "chat-list");
    const [title, newTitle] = [document, fresh].map((one) => one.getElementById("chat-title"));
    if (title && newTitle) title.textContent = newTitle.textContent;
    document.title = fresh.title;
    const [talk, newTalk] = [conversation(), fresh.getElementById("conversation")];
    const writing = talk?.querySelector("details[open] textarea");
    if (talk && newTalk && !writing && messageStates(talk) !== messageStates(newTalk)) {
      talk.replaceChildren(...newTalk.children);
      htmx.process(talk);
      rejoinder.dress(talk);
    }
    take(fresh, "composer-controls");
  };

  const lookAgain = async () => {
    if (looking || !seen()) return;
    [looking, outdated, lookedAt] = [true, false, Date.now()];
    try {
      const headers = { Accept: "text/html" };
      if (version) headers["If-None-Match"] = version;
      const response = await fetch(location.pathname, { headers });
      if (response.ok) {
        takePage(new DOMParser().parseFromString(await response.text(), "text/html"));
        version = response.headers.get("ETag") ?? "";
      } else if (response.status === 404) {
        rejoinder.tell("This chat was deleted.");
      }
    } catch {
      outdated = true; // offline; the next look will tell
    } finally {
      looking = false;
    }
    if (outdated) setTimeout(lookAgain, LOOK_AGAIN_MS);
  };

  const lookAgainSoon = () => {
    if (outdated || (conversation() && Date.now() - lookedAt > LOOK_AGAIN_MS)) lookAgain();
  };

  tabs.addEventListener("message", () => {
    outdated = true;
    lookAgain();
  });
  document.addEventListener("htmx:after:request", (event) => {
    const { request, response } = event.detail.ctx;
    if (request.method === "POST" && response.status < 400) tabs.postMessage("changed");
  });
  addEventListener("focus", lookAgainSoon);

  // A link to the chat that is shown already brings it up to date, so that typed text stays.
  document.addEventListener("click", async (event) => {
    const link = event.target.closest?.(".problem__link a");
    if (!link || link.pathname !== location.pathname || !conversation()) return;
    if (event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    await lookAgain();
    if (!outdated) document.getElementById("notice").replaceChildren();
    document.getElementById("composer-text")?.focus();
  });

  // -- Begin, and again after each piece of new HTML.

  document.addEventListener("htmx:after:process", () => setTimeout(connect)); // listeners are set
  document.addEventListener("visibilitychange", () => {
    check();
    warm();
    if (seen()) lookAgainSoon();
  });
  addEventListener("pageshow", (event) => {
    if (event.persisted) lookAgain();
  });
  rejoinder.whenReady(() => {
    connect();
    warm();
  });
})();
