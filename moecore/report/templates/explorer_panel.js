// One model: the image with its patches, what the router thinks of one, and the experts.

// Told apart by the colour-blind (Okabe and Ito); further experts by the golden angle.
const COLOURS = [
  "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#949494",
];
const SPACIOUS = 8; // columns of patches in which there is room for two numbers

function colour(expert) {
  if (expert === null) return "transparent";
  return COLOURS[expert] ?? `hsl(${Math.round(expert * 137.508) % 360} 62% 58%)`;
}

// Of the second of two models that are matched, the colours of the first.
function tint({ place, partners }, expert) {
  return `--tint: ${colour(place && partners && expert !== null ? partners[expert] : expert)}`;
}

function badge(view, expert) {
  return make("b", { class: "badge", style: tint(view, expert) }, `${expert ?? "–"}`);
}

function track(share) {
  const fill = make("span", { class: "fill", style: `width: ${(100 * share).toFixed(1)}%` });
  return make("span", { class: "track" }, fill);
}

// The true kind of the patch, next to the expert's number; empty if unknown.
function kindMark(view, token) {
  const kind = kindOf(view, token);
  return kind ? [make("small", { class: "kind" }, `k${kindNumber(view.phase, kind)}`)] : [];
}

function tokenWords(view, token) {
  const kind = kindOf(view, token);
  return [wordOf(view, token), kind ? kindName(view.phase, kind) : ""].filter(Boolean)
    .map((words) => `, ${words}`);
}

// Of the sentences that there are.
const paragraphs = (sentences) =>
  sentences.filter(Boolean).map((words) => make("p", { class: "quiet" }, words));
const number = (share) => make("span", { class: "number" }, percent(share));

// The elements of a panel stay, so that the focus does; draw() fills them.
class Panel {
  constructor(place, events) {
    this.place = place;
    this.title = make("h2");
    this.answer = make("p", { class: "answer" });
    this.count = make("p", { class: "count" });
    this.unlike = make("p", { class: "quiet" });
    this.specials = make("p", { class: "specials" });
    this.frames = [0, 1, 2].map((index) => this.frame(index, events));
    this.details = make("div", { class: "details" });
    this.list = make("div", {
      class: "list", role: "listbox", tabindex: "0", "aria-label": "Experts and their load",
    });
    this.layer = make("div");
    this.expert = make("div", { class: "expert" });
    this.sorry = make("p", { class: "missing" });
    const frames = make("div", { class: "frames" }, ...this.frames);
    const image = make("div", { class: "image" }, this.specials, frames, this.count, this.unlike);
    const list = make("div", { class: "of-layer" }, this.list, this.layer);
    this.body = make("div", { class: "body" },
      make("div", { class: "column" }, image, list),
      make("div", { class: "column" }, this.details, this.expert));
    const words = [this.title, this.answer, this.sorry];
    this.root = make("section", { class: "panel" }, ...words, this.body);
    this.specials.addEventListener("click", events.pick);
    this.list.addEventListener("click", (event) => events.expert(place, event));
    this.list.addEventListener("keydown", (event) => events.expertKey(place, event));
  }

  frame(index, events) {
    const canvas = make("canvas", { "aria-hidden": "true" });
    const cells = make("div", { class: "cells", role: "grid", tabindex: "0" });
    cells.addEventListener("click", events.pick);
    cells.addEventListener("keydown", (event) => events.move(this.place, index, event));
    cells.addEventListener("pointerover", events.hover);
    cells.addEventListener("pointerleave", events.leave);
    const frame = make("div", { class: "frame" }, canvas, cells);
    return make("figure", {}, frame, make("figcaption"));
  }

  // view: see viewOf in explorer.js
  draw(view) {
    this.title.textContent = view.name;
    this.sorry.hidden = Boolean(view.model);
    this.body.hidden = this.answer.hidden = !view.model;
    if (!view.model) {
      this.sorry.textContent = `${view.reason[0].toUpperCase()}${view.reason.slice(1)}.`;
      return;
    }
    this.answer.replaceChildren(...answerWords(view));
    this.drawSpecials(view);
    this.drawFrames(view);
    this.drawDetails(view, view.token);
    this.drawList(view);
    this.drawExpert(view);
  }

  drawSpecials(view) {
    const special = Array.from({ length: view.model.special }, (_, token) => token);
    this.specials.hidden = !special.length;
    this.specials.replaceChildren(...special.map((token) => {
      const { now, was, changed } = change(view, token);
      const words = changed ? ` (was ${was ?? "none"})` : "";
      return make("button", {
        type: "button", "data-token": token, class: changed ? "changed" : "",
        "aria-pressed": String(token === view.token),
      }, `${specialName(token)} `, badge(view, now), words);
    }));
  }

  drawFrames(view) {
    const { model, shown, image } = view;
    const planes = planesOf(model);
    const place = coordinates(model, Math.max(view.token, model.special));
    const picture = shown.picture ?? model.shown[0].picture;
    this.root.classList.toggle("volume", planes.length > 1);
    this.root.classList.toggle("text", model.grid.length === 1);
    this.frames.forEach((figure, index) => {
      const plane = planes[index];
      figure.hidden = !plane;
      if (!plane) return;
      const level = (place[plane.fixed] + 0.5) / model.grid[plane.fixed];
      const canvas = figure.querySelector("canvas");
      [canvas.width, canvas.height] = [model.grid[plane.column], model.grid[plane.row] ?? 1];
      if (picture) paint(canvas, picture, image, plane, level);
      this.drawCells(figure.querySelector(".cells"), view, plane, place);
      figure.querySelector("figcaption").textContent = plane.name;
    });
    this.count.replaceChildren(...countWords(view));
    this.unlike.replaceChildren(...unlikeWords(view));
  }

  drawCells(cells, view, plane, place) {
    const rows = sliceTokens(view.model, plane, place);
    const id = (token) => `cell-${this.place}-${plane.name}-${token}`;
    const spacious = rows[0].length <= SPACIOUS;
    const unlike = (token) => (view.unlike?.(token) ? " unlike" : "");
    cells.style.setProperty("--columns", rows[0].length);
    cells.style.setProperty("--rows", rows.length);
    cells.setAttribute("aria-label", `Patches of ${view.name} ${plane.name}`.trim());
    cells.setAttribute("aria-activedescendant", id(view.token));
    const cell = (token) => {
      const { now, was, changed } = change(view, token);
      const dim = view.kept !== null && view.kept !== now;
      const words = changed && spacious ? moveWords(view.shown, now, was) : `${now ?? "–"}`;
      return make("div", {
        role: "gridcell", id: id(token), "data-token": token,
        class: `cell${changed ? " changed" : ""}${dim ? " dim" : ""}${unlike(token)}`,
        style: tint(view, now),
        "aria-selected": String(token === view.token), "aria-label": patchWords(view, token),
      }, wordOf(view, token), make("span", {}, words, ...kindMark(view, token)));
    };
    cells.replaceChildren(...rows.map((row) => make("div", { role: "row" }, ...row.map(cell))));
    const selected = cells.querySelector("[aria-selected='true']");
    if (selected) scrollTo(cells, selected); // a long text scrolls
  }

  drawDetails(view, token) {
    const found = expertsOf(view, token);
    const { was, compared, changed } = change(view, token);
    const rows = found.map(({ expert, share, chosen }) => make(
      "li", { class: chosen ? "chosen" : "" }, badge(view, expert), track(share), number(share),
      make("span", { class: "mark" }, chosen ? "✓ chosen" : ""),
    ));
    const experts = view.model.layers[view.layer].experts.length;
    const all = found.length === experts;
    const what = all ? "probability of each expert" : `the first ${found.length} of ${experts}`;
    let words = "";
    if (changed) words = `${where(view.shown)}: expert ${was ?? "none"}`;
    if (!compared) words = "The clean image does not show this patch.";
    this.details.replaceChildren(
      make("h3", {}, placeName(view.model, token), ...tokenWords(view, token)),
      make("p", { class: "quiet" }, what),
      make("ol", { class: "bars" }, ...rows),
      make("p", { class: "margin quiet" }, marginWords(view, token)),
      make("p", { class: changed ? "note" : "quiet" }, words),
      make("p", { class: "best quiet" }, bestWords(view, token)),
    );
  }

  drawList(view) {
    const { model, layer, expert, kept, known } = view;
    const experts = model.layers[layer].experts;
    const most = Math.max(...experts.map((one) => one.load)) || 1;
    const id = (place) => `expert-${this.place}-${place}`;
    const rows = experts.map(({ load }, place) => make("div", {
      role: "option", id: id(place), "data-expert": place,
      class: place === kept ? "kept" : "", "aria-selected": String(place === expert),
      "aria-label": `expert ${place}, load ${percent(load)}`,
    }, badge(view, place), track(load / most), number(load)));
    const words = "expert and load, its share of all choices";
    const head = make("p", { class: "head", role: "presentation" }, words);
    this.list.setAttribute("aria-activedescendant", id(expert));
    this.list.replaceChildren(head, ...rows);
    scrollTo(this.list, rows[expert]);
    const { tells, regret } = known.layers[layer];
    this.layer.replaceChildren(...paragraphs([tells, regret, ...known.open]));
  }

  drawExpert(view) {
    const { model, layer, expert, phase, partners, beside } = view;
    const { load, classes, kinds, words } = model.layers[layer].experts[expert];
    const named = (rows, name) => rows.map(([place, share]) =>
      [make("span", { class: "name", title: name(place) }, name(place)), share]);
    const { together = [], earlier = [], later = [], without = [] } = view.known.layers[layer];
    // experts of another layer, whose colours say nothing of this one's match
    const ofLayer = (rows) =>
      (rows[expert] ?? []).map(([other, share]) => [badge({ place: 0 }, other), share]);
    const match = partners ? [`its match in ${beside}: expert ${partners[expert]}`] : [];
    const others = (together[expert] ?? []).map(([other, share]) => [badge(view, other), share]);
    const lists = [
      this.bars(`classes whose ${model.words ? "texts" : "images"} chose it`,
        named(classes, (place) => phase.answers[place])),
      this.bars("words that go to it, and which share of them", named(words, (word) => word)),
      this.bars(`${phase.kinds.name}s of its tokens`,
        named(kinds, (kind) => kindName(phase, kind))),
      this.bars("chosen with it, share of its tokens", others),
      this.bars("it most often follows, in the layer before", ofLayer(earlier)),
      this.bars("it is most often followed by, in the next layer", ofLayer(later)),
    ];
    this.expert.replaceChildren(
      make("h3", {}, "Expert ", badge(view, expert), ` · load ${percent(load)}`),
      ...paragraphs([...match, without[expert]]),
      make("div", { class: "lists" }, ...this.map(view), ...lists.flat()),
      ...this.examples(view),
    );
  }

  // Tokens that chose it: those that it is surest of and, of a trace, as many drawn ones.
  examples(view) {
    const { favourites } = view.model.layers[view.layer].experts[view.expert];
    const { surest, contexts } = view.known.layers[view.layer];
    const rows = contexts
      ? this.contexts(contexts[view.expert], favourites) : this.crops(view, favourites);
    const list = (items) => make("ul", { class: contexts ? "contexts" : "crops" }, ...items);
    const first = surest?.[view.expert] ?? rows.length;
    const drawn = rows.length > first ? ["drawn at random from all that chose it"] : [];
    return [
      ...paragraphs([favouriteWords(view)]), list(rows.slice(0, first)),
      ...paragraphs(drawn), list(rows.slice(first)),
    ];
  }

  // Words before a token, itself, words after it.
  contexts(words, favourites) {
    return words.map(([before, word, after], place) => {
      const { image, patch, probability } = favourites[place];
      const title = `item ${image}, token ${patch + 1}`;
      return make("li", { title }, number(probability),
        make("span", {}, `${before} `, make("b", {}, word), ` ${after}`));
    });
  }

  // Where its patches lie: white where most of them chose it; nothing where none did.
  map({ model, layer, expert, token }) {
    const { experts, places } = model.layers[layer];
    if (!places || !experts[expert].peak) return [];
    const at = coordinates(model, Math.max(token, model.special));
    const slices = planesOf(model).map((plane) => {
      const canvas = make("canvas", { "aria-hidden": "true" });
      paint(canvas, places, expert, plane, (at[plane.fixed] + 0.5) / model.grid[plane.fixed]);
      return canvas;
    });
    const words = `where it is chosen; white: by ${percent(experts[expert].peak)} of the patches`;
    return [make("div", { class: "map" }, ...slices, make("p", { class: "quiet" }, words))];
  }

  // Rows of a name and a share; nothing where there are none.
  bars(title, rows) {
    if (!rows.length) return [];
    const items = rows.map(([name, share]) =>
      make("li", {}, name, track(share / rows[0][1]), number(share)));
    const list = make("ol", { class: "bars classes" }, ...items);
    return [make("div", {}, make("p", { class: "quiet" }, title), list)];
  }

  crops({ model, layer, expert }, favourites) {
    const { experts, crops } = model.layers[layer];
    const before = experts.slice(0, expert).reduce((sum, one) => sum + one.favourites.length, 0);
    return favourites.map(({ image, patch, probability }, place) => {
      const name = placeName(model, patch + model.special).toLowerCase();
      const words = `image ${image}, ${name}, probability ${percent(probability)}`;
      const canvas = make("canvas", { role: "img", "aria-label": words });
      paint(canvas, crops, before + place, { row: 0, column: 1 }, 0);
      return make("li", { title: words }, canvas);
    });
  }
}
