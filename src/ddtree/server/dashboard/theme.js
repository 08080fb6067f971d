// Light, dark, or as the system says. A classic script, so that the page is never drawn in the wrong one first.
(() => {
  const NAME = "ddtree-theme";
  const ORDER = ["auto", "light", "dark"];

  function apply(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  let theme = "auto";
  try {
    const kept = localStorage.getItem(NAME);
    if (ORDER.includes(kept)) theme = kept;
  } catch {
    // Storage is forbidden: the system's theme it is.
  }
  apply(theme);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      button.textContent = `Theme: ${theme}`;
    };
    label();
    button.addEventListener("click", () => {
      theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
      apply(theme);
      label();
      try {
        localStorage.setItem(NAME, theme);
      } catch {
        // Lasts until the page is left.
      }
    });
  });
})();
