"use strict";
// Runs before the first paint, so that a chosen theme does not flash. Without a choice the system's applies.
(function () {
  let chosen = null;
  try { chosen = localStorage.getItem("ephemeron-theme"); } catch (e) { /* no storage: as the system */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
