// The controls and the list of images. ``state`` and the functions that read it are below.

let inStrip = null; // the model whose images are there

function fillControls(shown) {
  const methods = phaseNow().methods.map(({ name, model }) =>
    model ? [name, name] : [name, `${name} (no experts: no routing)`, true]);
  const layers = Math.max(1, ...shown.map((model) => model.layers.length));
  const places = Array.from({ length: layers }, (_, place) => [place, `${place + 1} of ${layers}`]);
  const labels = stepLabels(shown);
  fill("phase", DATA.phases.map((phase, place) => [place, phase.title]), state.phase);
  find("phase-label").hidden = DATA.phases.length < 2;
  document.querySelectorAll("#controls .choice").forEach((label) => {
    label.hidden = methods.length < 2;
  });
  fill("method", methods, state.method);
  fill("beside", [["", "none"], ...methods], state.beside);
  fill("layer", places, state.layer);
  fill("kind", kindsOf(shown).map((kind) => [kind, KINDS[kind].name]), state.kind);
  document.querySelectorAll("#controls .wide").forEach((label) => {
    label.hidden = !state.kind;
  });
  find("how").textContent = KINDS[state.kind]?.slider ?? "";
  const slider = find("step");
  slider.max = Math.max(0, labels.length - 1);
  slider.value = state.step;
  slider.disabled = labels.length < 2;
  slider.setAttribute("aria-valuetext", labels[state.step] ?? "");
  find("label").textContent = labels[state.step] ?? "";
}

function fill(id, options, value) {
  const rows = options.map(([key, words, disabled]) =>
    make("option", { value: key, disabled: disabled ? "" : null }, words));
  find(id).replaceChildren(...rows);
  find(id).value = value;
}

function drawStrip(model) {
  const images = find("images");
  if (inStrip !== model) {
    inStrip = model;
    const [plane] = planesOf(model);
    const isText = model.grid.length === 1;
    find("images-title").textContent = `${isText ? "Texts" : "Images"} of the ${phaseNow().source}`;
    images.replaceChildren(...model.images.map((_, image) => {
      const { picture } = model.shown[0];
      const canvas = make(picture ? "canvas" : "span", { "aria-hidden": "true" });
      const words = labelWords(phaseNow(), model, image);
      if (picture) paint(canvas, picture, image, plane, 0.5);
      else canvas.textContent = image + 1;
      return make("div", {
        role: "option", id: `image-${image}`, "data-image": image, title: words,
        "aria-label": words,
      }, canvas);
    }));
  }
  [...images.children].forEach((option, image) =>
    option.setAttribute("aria-selected", String(image === state.image)));
  images.setAttribute("aria-activedescendant", `image-${state.image}`);
  scrollTo(images, images.children[state.image]);
  const words = labelWords(phaseNow(), model, state.image);
  const place = `number ${model.images[state.image]} of the ${phaseNow().source}`;
  find("truth").replaceChildren(make("b", {}, words), words ? `, ${place}` : place);
}

// What is shown, and how it is chosen. The address holds it, so that a view can be shared.

const KINDS = {
  noise: { name: "noise", slider: "Strength" },
  attack: { name: "attack radius", slider: "Strength" },
  augmentation: { name: "augmentation", slider: "Which" },
  epoch: { name: "training epoch", slider: "After" },
};
const WAYS = {
  ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
};
const NARROW = 700; // pixels: on a phone one model comes first
const state = {
  phase: 0, method: "", beside: null, layer: 0, image: 0, token: null, kind: "", step: 0,
  experts: [null, null], // kept by the reader; null: that of the patch
};
const find = (id) => document.getElementById(id);
let hovered = null;
let turn = 0;
let views = [];

const phaseNow = () => DATA.phases[state.phase];
const entry = (name) => phaseNow().methods.find((method) => method.name === name);
const clamp = (value, length) => Math.min(Math.max(0, Math.trunc(value) || 0), length - 1);
const names = () => (state.beside ? [state.method, state.beside] : [state.method]);
const models = () => names().map((name) => entry(name).model).filter(Boolean);

function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const numeric = (name) => (asked.has(name) ? Number(asked.get(name)) : null);
  state.phase = Math.max(0, DATA.phases.findIndex(({ name }) => name === asked.get("phase")));
  state.method = asked.get("method") ?? "";
  state.beside = asked.get("beside");
  state.layer = (numeric("layer") ?? 1) - 1;
  state.image = numeric("image");
  state.token = numeric("patch");
  state.kind = asked.get("kind") ?? "";
  state.step = numeric("step");
  state.experts = [numeric("expert"), numeric("expert2")];
}

function writeAddress() {
  const { method, beside, layer, image, token, kind, step, experts } = state;
  const words = { phase: phaseNow().name, method, beside, layer: layer + 1, image };
  Object.assign(words, { patch: token, kind, step });
  if (experts[0] !== null) words.expert = experts[0];
  if (experts[1] !== null) words.expert2 = experts[1];
  history.replaceState(null, "", `#${new URLSearchParams(words)}`);
}

// Keep the choices that exist; set a first value for the others.
function settle() {
  const routed = phaseNow().methods.filter((method) => method.model);
  if (!entry(state.method)) state.method = routed[0]?.name ?? phaseNow().methods[0].name;
  if (state.beside === null && innerWidth > NARROW) {
    state.beside = routed.find((method) => method.name !== state.method)?.name;
  }
  if (!entry(state.beside)) state.beside = "";
  const shown = models();
  if (!shown.length) return;
  const kinds = kindsOf(shown);
  state.layer = clamp(state.layer, Math.max(...shown.map((model) => model.layers.length)));
  state.image = clamp(state.image, Math.min(...shown.map((model) => model.images.length)));
  state.token = clamp(state.token ?? middle(shown[0]), tokens(shown[0]));
  if (!kinds.includes(state.kind)) state.kind = kinds[0] ?? "";
  state.step = clamp(state.step, stepLabels(shown).length);
}

// Where something is to be seen.
const middle = (model) => tokenAt(model, model.grid.map((length) => length >> 1));

function kindsOf(shown) {
  const there = new Set(shown.flatMap((model) => model.shown.map((one) => one.kind)));
  return Object.keys(KINDS).filter((kind) => there.has(kind));
}

function stepLabels(shown) {
  const all = shown.map((model) => steps(model, state.kind).map((one) => one.label));
  return all.reduce((one, other) => (other.length > one.length ? other : one), []);
}

// The contents of a panel; without ``model``, the reason why it is empty.
function viewOf(name, place) {
  const { model, reason, known: answers } = entry(name);
  if (!model) return { name, reason };
  const layer = Math.min(state.layer, model.layers.length - 1);
  const there = steps(model, state.kind);
  const shown = there[state.step] ?? model.shown[0];
  const asked = state.experts[place];
  const kept = asked === null ? null : clamp(asked, model.layers[layer].experts.length);
  const { image, token } = state;
  const view = { name, place, model, shown, layer, kept, image, token, known: answers };
  const expert = kept ?? bestExpert(view, state.token) ?? 0;
  const missing = state.step >= there.length;
  return { ...view, expert, missing, kind: KINDS[state.kind]?.name, phase: phaseNow() };
}

// What two models have in common where their experts were matched.
function pair(one, other) {
  if (!one.model || !other?.model || one.layer !== other.layer) return;
  for (const [view, { name }] of [[one, other], [other, one]]) {
    view.beside = name;
    view.partners = partnersOf(phaseNow(), view.name, name, view.layer);
  }
  if (!one.partners || one.missing !== other.missing) return;
  one.unlike = other.unlike = (token) =>
    (one.partners[bestExpert(one, token)] ?? null) !== bestExpert(other, token);
}

async function draw() {
  settle();
  const mine = ++turn;
  await Promise.all(models().map(unpackModel));
  if (mine !== turn) return; // something else was chosen meanwhile
  hovered = null;
  fillControls(models());
  views = names().map(viewOf);
  pair(...views);
  panels.forEach((panel, place) => {
    panel.root.hidden = !views[place];
    if (views[place]) panel.draw(views[place]);
  });
  find("main").dataset.panels = views.length;
  find("strip").hidden = !models().length;
  if (models().length) drawStrip(models()[0]);
  const seen = views.filter((view) => view.model);
  const words = seen.map((view) => `${view.name}: ${patchWords(view, view.token)}`);
  find("said").textContent = words.join(". ");
  writeAddress();
  find("main").dataset.drawn = mine;
}

function set(values) {
  Object.assign(state, values);
  draw();
}

function keep(place, expert) {
  state.experts[place] = expert;
  const { partners } = views[place];
  if (partners) state.experts[1 - place] = partners[expert] ?? null;
  draw();
}

// How far an arrow key goes, to the right and down; undefined for other keys, and with Shift.
function arrow(event) {
  if (event.shiftKey) return undefined;
  if (WAYS[event.key]) event.preventDefault();
  return WAYS[event.key];
}

function detail(token) {
  hovered = token;
  views.forEach((view, place) => view.model && panels[place].drawDetails(view, token));
}

const events = {
  pick(event) {
    const cell = event.target.closest("[data-token]");
    if (cell) set({ token: Number(cell.dataset.token) });
  },
  hover(event) {
    const cell = event.target.closest("[data-token]");
    if (cell && hovered !== Number(cell.dataset.token)) detail(Number(cell.dataset.token));
  },
  leave() {
    detail(state.token);
  },
  move(place, index, event) {
    const way = arrow(event);
    if (!way) return;
    const { model } = views[place];
    const { row, column, flipped } = planesOf(model)[index];
    const at = coordinates(model, Math.max(state.token, model.special));
    at[column] = clamp(at[column] + way[0], model.grid[column]);
    if (row >= 0) at[row] = clamp(at[row] + (flipped ? -way[1] : way[1]), model.grid[row]);
    set({ token: tokenAt(model, at) });
  },
  expert(place, event) {
    const row = event.target.closest("[data-expert]");
    if (!row) return;
    const expert = Number(row.dataset.expert);
    keep(place, state.experts[place] === expert ? null : expert);
  },
  expertKey(place, event) {
    const way = arrow(event);
    const { expert, model, layer } = views[place];
    if (way) keep(place, clamp(expert + way[0] + way[1], model.layers[layer].experts.length));
  },
};
const panels = [0, 1].map((place) => new Panel(place, events));

function pickImage(event) {
  const option = event.target.closest("[data-image]");
  if (option) set({ image: Number(option.dataset.image) });
}

function moveImage(event) {
  const way = arrow(event);
  const columns = getComputedStyle(find("images")).gridTemplateColumns.split(" ").length;
  if (way) set({ image: state.image + way[0] + way[1] * columns });
}

// Keys that no control has taken.
function pressKey(event) {
  const isTaken = event.defaultPrevented || event.target.matches("input, select");
  const [right, down] = WAYS[event.key] ?? [0, 0];
  if (isTaken || event.altKey || event.ctrlKey || event.metaKey || !views[0]?.model) return;
  const { expert, model, layer } = views[0];
  if (event.key === "Escape") set({ experts: [null, null] });
  else if (right && event.shiftKey) set({ layer: state.layer + right });
  else if (right) set({ image: state.image + right });
  else if (down && event.shiftKey) keep(0, clamp(expert + down, model.layers[layer].experts.length));
  else return;
  event.preventDefault();
}

async function start() {
  await unpackPhases();
  find("panels").append(...panels.map((panel) => panel.root));
  for (const name of ["method", "beside", "kind"]) {
    const first = name === "kind" ? { step: 0 } : {};
    find(name).addEventListener("input", (event) => set({ [name]: event.target.value, ...first }));
  }
  for (const name of ["phase", "layer", "step"]) {
    find(name).addEventListener("input", (event) => set({ [name]: Number(event.target.value) }));
  }
  find("tint").addEventListener("input", (event) =>
    find("main").classList.toggle("plain", !event.target.checked));
  find("images").addEventListener("click", pickImage);
  find("images").addEventListener("keydown", moveImage);
  addEventListener("keydown", pressKey);
  addEventListener("hashchange", () => {
    readAddress();
    draw();
  });
  readAddress();
  draw();
}

if ("DecompressionStream" in globalThis) start();
else find("panels").textContent =
  "This browser cannot unpack the page's data; Chrome 80, Firefox 113 and Safari 16.4 can.";
