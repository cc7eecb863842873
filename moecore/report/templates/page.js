// Sortable tables, tabs, links that open the folded section they point to, and a bar that stays
// visible. Without scripts, all sections are shown one below the other.
"use strict";
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

  // Panes: a row of tabs; the arrow keys select one.
  function choose(box, pane) {
    all(":scope > .pane", box).forEach((one) => { one.hidden = one !== pane; });
    all(":scope > .tabs > button", box).forEach((tab) => {
      const chosen = tab.getAttribute("aria-controls") === pane.id;
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
    });
    measure();
  }
  function tabs(box) {
    const panes = all(":scope > .pane", box);
    const list = document.createElement("div");
    list.className = "tabs";
    list.setAttribute("role", "tablist");
    list.setAttribute("aria-label", box.dataset.label);
    panes.forEach((pane) => {
      const tab = document.createElement("button");
      tab.type = "button";
      tab.id = `${pane.id}-tab`;
      tab.textContent = pane.dataset.name;
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-controls", pane.id);
      tab.addEventListener("click", () => choose(box, pane));
      pane.setAttribute("role", "tabpanel");
      pane.setAttribute("aria-labelledby", tab.id);
      list.append(tab);
    });
    list.addEventListener("keydown", (event) => {
      const buttons = [...list.children];
      const at = buttons.indexOf(document.activeElement);
      const last = buttons.length - 1;
      const to = {
        ArrowRight: (at + 1) % buttons.length,
        ArrowLeft: (at + last) % buttons.length,
        Home: 0,
        End: last,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      buttons[to].click();
      buttons[to].focus();
    });
    box.prepend(list);
    box.classList.add("chosen");
    choose(box, panes[0]);
  }

  // Sorting: best first, then the other way round, then as it was.
  const NEXT = { none: "first", first: "second", second: "none" };
  function sort(table, column, head) {
    const order = NEXT[head.dataset.order || "none"];
    all("thead th", table).forEach((one) => {
      one.dataset.order = "none";
      one.setAttribute("aria-sort", "none");
    });
    head.dataset.order = order;
    const rows = [...table.tBodies[0].rows];
    const descending = (head.dataset.better === "lower" || column === 0) !== (order === "first");
    if (order !== "none") head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[column];
      if (column === 0) return cell.textContent;
      return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
    };
    rows.sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      if (order === "none" || a === b) return one.dataset.place - other.dataset.place;
      if (a === null || b === null) return a === null ? 1 : -1;
      return (a < b ? -1 : 1) * (descending ? -1 : 1);
    });
    table.tBodies[0].append(...rows);
  }
  function sortable(table) {
    [...table.tBodies[0].rows].forEach((row, place) => { row.dataset.place = place; });
    all("thead th", table).forEach((head, column) => {
      const name = head.querySelector(".name");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...name.childNodes);
      name.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => sort(table, column, head));
    });
  }

  // A table, or a picture, that is wider than its place says that it scrolls.
  function measure() {
    all(".scroll").forEach((one) => {
      const over = one.scrollWidth > one.clientWidth + 1;
      one.parentElement.classList.toggle("over", over);
      const end = one.scrollLeft + one.clientWidth >= one.scrollWidth - 1;
      one.parentElement.classList.toggle("ended", over && end);
      if (over) one.tabIndex = 0; else one.removeAttribute("tabindex");
    });
  }

  // A link opens the folds, and chooses the pane, that its target lies in.
  function reveal() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let up = target; up; up = up.parentElement) {
      if (up.tagName === "DETAILS") up.open = true;
      if (up.classList.contains("pane") && up.parentElement.classList.contains("chosen")) {
        choose(up.parentElement, up);
      }
    }
    target.scrollIntoView();
    measure();
  }

  // The bar marks the section in view, and lists its parts.
  const bar = document.querySelector(".bar");
  const LANDING = parseFloat(getComputedStyle(document.documentElement).scrollPaddingTop);
  function mark() {
    const line = LANDING + 16;
    const above = (one) => one.getBoundingClientRect().top <= line;
    const sections = all("main > section");
    const bottom = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
    const here = bottom ? sections.at(-1) : sections.findLast(above) || sections[0];
    all(".parts", bar).forEach((one) => { one.hidden = one.dataset.of !== here.id; });
    const parts = all(":scope > [id]", here).filter(above);
    [here.id, parts.length ? parts.at(-1).id : ""].forEach((id, level) => {
      const row = bar.querySelector(level ? ".parts:not([hidden])" : ".places");
      if (!row) return;
      if (!id) row.scrollLeft = 0;
      all("a", row).forEach((link) => {
        const current = link.getAttribute("href") === `#${id}`;
        if (current === link.hasAttribute("aria-current")) return;
        link.toggleAttribute("aria-current", current);
        if (!current) return;
        link.setAttribute("aria-current", "location");
        row.scrollTo({ left: link.offsetLeft - row.clientWidth / 2 + link.offsetWidth / 2 });
      });
    });
  }

  // An explanation appears below the term.
  function place(event) {
    const asked = document.querySelector(`[popovertarget="${event.target.id}"][data-asked]`);
    if (event.newState !== "open" || !asked) return;
    const box = asked.getBoundingClientRect();
    const width = event.target.offsetWidth;
    const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8));
    const low = box.bottom + event.target.offsetHeight + 12 > innerHeight;
    event.target.style.left = `${left}px`;
    event.target.style.top = `${low ? box.top - event.target.offsetHeight - 6 : box.bottom + 6}px`;
  }
  all(".ask").forEach((button) => button.addEventListener("click", () => {
    all("[data-asked]").forEach((one) => one.removeAttribute("data-asked"));
    button.dataset.asked = "";
  }));
  all("[popover]").forEach((one) => one.addEventListener("toggle", place));

  all(".choice").forEach(tabs);
  all("table.sortable").forEach(sortable);
  all(".scroll").forEach((one) => one.addEventListener("scroll", measure, { passive: true }));
  all("details").forEach((one) => one.addEventListener("toggle", () => { measure(); mark(); }));
  addEventListener("hashchange", reveal);
  // A second click on the same link has to open a fold that was closed since.
  addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest('a[href^="#"]');
    if (link && link.hash === location.hash) reveal();
  });
  addEventListener("resize", () => { measure(); mark(); });
  addEventListener("scroll", mark, { passive: true });
  measure();
  mark();
  reveal();
})();
