// Tabs: arrow keys move between them, as everywhere.

export function tabs(list) {
  const all = [...list.querySelectorAll('[role="tab"]')];
  const open = (chosen, focus) => {
    for (const tab of all) {
      const on = tab === chosen;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !on;
    }
    if (focus) chosen.focus();
  };
  all.forEach((tab, index) => {
    tab.addEventListener("click", () => open(tab, false));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: all.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      open(all[(to + all.length) % all.length], true);
    });
  });
  open(all[0], false);
}
