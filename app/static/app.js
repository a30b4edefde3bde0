// What all pages do beyond htmx. No inline code, no eval: the policy forbids both.
// The other scripts build on `rejoinder`.
"use strict";

const rejoinder = (() => {
  const cookie = (name) =>
    document.cookie
      .split("; ")
      .find((pair) => pair.startsWith(`${name}=`))
      ?.slice(name.length + 1) ?? "";

  // -- Requests: the token is read when it is sent, so an old page outlives a new sign-in.

  const token = () => cookie("__Host-rejoinder_csrf") || cookie("rejoinder_csrf");

  document.addEventListener("htmx:config:request", (event) => {
    const request = event.detail.ctx.request;
    if (request.method === "GET") return;
    request.headers["x-csrftoken"] = token();
    // The answer may bring the list of chats anew: with as many as are here.
    const shown = document.querySelectorAll(".chat-list__item").length;
    request.headers["x-chats-shown"] = String(shown);
  });

  const post = (url) =>
    fetch(url, {
      method: "POST",
      headers: { "x-csrftoken": token() },
      body: new URLSearchParams(),
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

  // -- New content: each function is given the page once, and later every new element.

  const dressers = [];
  const dress = (root) => dressers.forEach((dresser) => dresser(root));
  const all = (root, selector) => [
    ...(root.matches?.(selector) ? [root] : []),
    ...root.querySelectorAll(selector),
  ];

  let ready = false;
  const onContent = (dresser) => {
    dressers.push(dresser);
    if (ready) dresser(document);
  };
  const whenReady = (begin) => {
    if (ready) begin();
    else document.addEventListener("DOMContentLoaded", begin);
  };

  document.addEventListener("DOMContentLoaded", () => {
    ready = true;
    dress(document);
  });
  document.addEventListener("htmx:after:settle", (event) => {
    for (const node of event.detail.newContent) {
      if (node.nodeType === Node.ELEMENT_NODE && node.isConnected) dress(node);
    }
  });

  // -- Times in the reader's zone.

  const whenFormat = new Intl.DateTimeFormat(undefined, {
    dateStyle: "medium",
    timeStyle: "medium",
  });

  onContent((root) => {
    for (const time of all(root, "time[datetime]:not([title])")) {
      const when = new Date(time.dateTime);
      if (Number.isNaN(when.getTime())) continue;
      time.title = time.textContent.trim();
      time.textContent = whenFormat.format(when);
      const column = time.closest("td")?.cellIndex;
      const heading = time.closest("table")?.tHead?.rows[0].cells[column];
      if (heading) heading.textContent = heading.textContent.replace(" (UTC)", "");
    }
  });

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

  onContent((root) => {
    for (const code of all(root, ".code")) {
      if (code.querySelector(".code__copy") || !code.closest(".answer:not(.answer--open)")) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "button button--small code__copy";
      button.textContent = "Copy";
      code.append(button);
    }
  });

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

  // -- Wide tables and code are scrolled by keyboard too.

  onContent((root) => {
    for (const box of all(root, ".answer .table, .answer pre, .table-scroll")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    }
  });

  return { all, copy, dress, onContent, post, tell, whenReady };
})();
