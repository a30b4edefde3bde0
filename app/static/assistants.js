// The form of an assistant: what was written is not lost by leaving the page unasked.
"use strict";

(() => {
  const form = document.getElementById("assistant-form");
  if (!form) return;
  let changed = document.querySelector(".notice .problem") !== null;
  form.addEventListener("input", () => (changed = true));
  form.addEventListener("submit", () => (changed = false));
  addEventListener("beforeunload", (event) => {
    if (changed) event.preventDefault();
  });
})();
