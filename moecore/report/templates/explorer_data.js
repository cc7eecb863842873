// The page's data: packed arrays, and functions that read one token from them.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const CHOSEN = 128; // the highest bit of a mark
const SURE = 127; // a probability of 1 in its other bits
const NOWHERE = 65535; // a patch of a view that no patch of the clean image shows
const arrays = new Map(); // place in the pool → bytes

const product = (numbers) => numbers.reduce((one, other) => one * other, 1);
const patches = (model) => product(model.grid);
const tokens = (model) => model.special + patches(model);

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function unpack(place) {
  if (!arrays.has(place)) arrays.set(place, await inflate(DATA.pool[place]));
}

// Experts of a trace are packed, because there may be thousands.
async function unpackPhases() {
  if (Array.isArray(DATA.phases)) return;
  DATA.phases = JSON.parse(new TextDecoder().decode(await inflate(DATA.phases)));
}

// All arrays of a model are there once this is done.
async function unpackModel({ layers, shown, kinds }) {
  const ofLayers = layers.flatMap((one) => [one.crops, one.places]);
  const pictures = [...ofLayers, ...shown.map((one) => one.picture)];
  const places = [
    kinds,
    ...pictures.map((picture) => picture?.pixels ?? null),
    ...shown.flatMap((one) => [one.origins, ...one.trace.layers]),
  ];
  await Promise.all([...new Set(places)].filter((place) => place !== null).map(unpack));
}

// The arrays of a layer: see packed_record in moecore/nn/encoded_routing.py.
function record(model, shown, layer) {
  const bytes = arrays.get(shown.trace.layers[layer]);
  const all = shown.trace.answers.length * tokens(model);
  const wide = model.layers[layer].experts.length > 255;
  const Numbers = wide ? Uint16Array : Uint8Array;
  const size = Numbers.BYTES_PER_ELEMENT;
  const kept = (bytes.length / all - size) / (size + 1);
  return {
    kept,
    none: wide ? 65535 : 255,
    best: new Numbers(bytes.buffer, 0, all),
    experts: new Numbers(bytes.buffer, all * size, all * kept),
    marks: bytes.subarray(all * size * (kept + 1)),
  };
}

// The expert of the largest weight in a token; null where none processed it.
function bestExpert({ model, shown, layer, image }, token) {
  const { best, none } = record(model, shown, layer);
  const expert = best[image * tokens(model) + token];
  return expert === none ? null : expert;
}

// A token's true kind, which generated data have; 0 if unknown.
function kindOf({ model, image }, token) {
  return model.kinds === null ? 0 : arrays.get(model.kinds)[image * tokens(model) + token];
}

// Kinds are kept from 1; labels of a trace begin with 0.
const kindNumber = ({ kinds }, kind) => kind - 1 + kinds.first;
const kindName = (phase, kind) => `${phase.kinds.name} ${kindNumber(phase, kind)}`;

// The word of a text's token; "" for an image.
const wordOf = ({ model, image }, token) => model.words?.[image][token] ?? "";

// The first experts of a token: [{expert, share, chosen}].
function expertsOf({ model, shown, layer, image }, token) {
  const { kept, experts, marks } = record(model, shown, layer);
  const start = (image * tokens(model) + token) * kept;
  return Array.from({ length: kept }, (_, rank) => ({
    expert: experts[start + rank],
    share: (marks[start + rank] % CHOSEN) / SURE,
    chosen: marks[start + rank] >= CHOSEN,
  }));
}

// How far the least probable of the chosen experts is above the next; null where none is next.
function marginOf(view, token) {
  const found = expertsOf(view, token);
  const shares = (chosen) => found.filter((one) => one.chosen === chosen).map((one) => one.share);
  const margin = Math.min(...shares(true)) - Math.max(...shares(false));
  return Number.isFinite(margin) ? margin : null;
}

// Of each expert of a model its partner in another; null where the two were not matched.
function partnersOf(phase, from, to, layer) {
  const match = phase.matches.find((one) => one.includes(from) && one.includes(to));
  if (!match || from === to) return null;
  const [first, , layers] = match;
  if (first === from) return layers[layer];
  const partners = [];
  layers[layer].forEach((second, expert) => { partners[second] = expert; });
  return partners;
}

// What became of a token against the clean image in the trained model.
function change(view, token) {
  const now = bestExpert(view, token);
  const origin = originOf(view, token);
  if (origin === null) return { now, was: null, compared: false, changed: false };
  const was = bestExpert({ ...view, shown: view.model.shown[0] }, origin);
  return { now, was, compared: true, changed: now !== was };
}

// The corresponding token of the clean image; null if there is none.
function originOf({ model, shown, image }, token) {
  if (shown.origins === null || token < model.special) return token;
  const origins = new Uint16Array(arrays.get(shown.origins).buffer);
  const origin = origins[image * patches(model) + token - model.special];
  return origin === NOWHERE ? null : model.special + origin;
}

// The steps of the slider: clean first, or the epochs of the training.
function steps(model, kind) {
  const found = model.shown.filter((one) => one.kind === kind);
  return kind === "epoch" ? found : [model.shown[0], ...found];
}

// What slices of the grid show along rows and columns; of flat images there is one.
function planesOf({ grid }) {
  if (grid.length < 3) return [{ name: "", row: grid.length - 2, column: grid.length - 1 }];
  return [
    { name: "axial", fixed: 2, row: 1, column: 0, flipped: true },
    { name: "coronal", fixed: 1, row: 2, column: 0, flipped: true },
    { name: "sagittal", fixed: 0, row: 2, column: 1, flipped: true },
  ];
}

function coordinates({ grid, special }, token) {
  const place = [];
  let rest = token - special;
  for (const length of [...grid].reverse()) {
    place.unshift(rest % length);
    rest = Math.floor(rest / length);
  }
  return place;
}

function tokenAt({ grid, special }, place) {
  return place.reduce((sum, index, axis) => sum * grid[axis] + index, 0) + special;
}

// The tokens of a slice through ``place``, row by row from above.
function sliceTokens(model, plane, place) {
  const rows = model.grid[plane.row] ?? 1;
  const columns = model.grid[plane.column];
  const token = (row, column) => {
    const at = [...place];
    if (plane.row >= 0) at[plane.row] = plane.flipped ? rows - 1 - row : row;
    at[plane.column] = column;
    return tokenAt(model, at);
  };
  return Array.from({ length: rows }, (_, row) =>
    Array.from({ length: columns }, (_, column) => token(row, column)));
}

// Draws a slice of a picture; ``level`` from 0 to 1 says where it lies along the fixed axis.
function paint(canvas, picture, image, plane, level) {
  const [, channels, ...size] = picture.shape;
  const strides = size.map((_, axis) => product(size.slice(axis + 1)));
  const bytes = arrays.get(picture.pixels);
  const all = product(size);
  const height = size[plane.row];
  const width = size[plane.column];
  const flat = plane.fixed === undefined;
  const start = flat ? 0 : Math.floor(level * size[plane.fixed]) * strides[plane.fixed];
  const pixels = new ImageData(width, height);
  for (let y = 0; y < height; y++) {
    const row = plane.flipped ? height - 1 - y : y;
    for (let x = 0; x < width; x++) {
      const place = start + row * strides[plane.row] + x * strides[plane.column];
      const target = 4 * (y * width + x);
      for (let colour = 0; colour < 3; colour++) {
        const channel = image * channels + (channels >= 3 ? colour : 0);
        pixels.data[target + colour] = bytes[channel * all + place];
      }
      pixels.data[target + 3] = 255;
    }
  }
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

// Elements and sentences. Names come from folders of images: they are never read as HTML.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Brings an element into what is seen of the box that scrolls around it.
function scrollTo(box, element) {
  const { offsetTop, offsetLeft, offsetHeight, offsetWidth } = element;
  const low = offsetTop < box.scrollTop;
  const high = offsetTop + offsetHeight > box.scrollTop + box.clientHeight;
  if (low || high) box.scrollTop = offsetTop - box.clientHeight / 2;
  const left = offsetLeft < box.scrollLeft;
  const right = offsetLeft + offsetWidth > box.scrollLeft + box.clientWidth;
  if (left || right) box.scrollLeft = offsetLeft - box.clientWidth / 2;
}

function percent(share) {
  const digits = share > 0 && share < 0.0995 ? 1 : 0;
  return `${(100 * share).toFixed(digits)} %`;
}

const specialName = (token) => (token === 0 ? "class token" : `special token ${token + 1}`);
const where = (shown) => (shown.kind === "epoch" ? "In the trained model" : "In the clean image");

// From the clean image to this one, or from this epoch to the trained model.
function moveWords(shown, now, was) {
  const [from, to] = shown.kind === "epoch" ? [now, was] : [was, now];
  return `${from ?? "–"}→${to ?? "–"}`;
}

function placeName(model, token) {
  if (token < model.special) return `The ${specialName(token)}`;
  const place = coordinates(model, token).map((index) => index + 1);
  if (place.length === 1) return `Token ${place[0]}`;
  if (place.length === 2) return `Patch in row ${place[0]}, column ${place[1]}`;
  return `Cube ${place[0]} to the right, ${place[1]} to the front, ${place[2]} up`;
}

function patchWords(view, token) {
  const { now, was, changed } = change(view, token);
  const place = [placeName(view.model, token), wordOf(view, token)].filter(Boolean).join(", ");
  const words = `${place}: expert ${now ?? "none"}`;
  const kind = kindOf(view, token);
  const known = kind ? `${words}; ${kindName(view.phase, kind)}` : words;
  return changed ? `${known}; ${where(view.shown).toLowerCase()} ${was ?? "none"}` : known;
}

function labelWords(phase, model, image) {
  const labels = model.labels[image];
  const text = model.words ? [`Text ${image + 1}`] : [];
  if (phase.classes) return [...text, ...labels.map((place) => phase.answers[place])].join(", ");
  const numbers = labels.map((label) => `${phase.answers[0]} ${label.toFixed(1)} ${phase.unit}`);
  return [...text, ...numbers].join(", ");
}

function answerWords({ model, shown, image, phase }) {
  const answers = shown.trace.answers[image];
  const values = shown.trace.values[image];
  if (!answers.length) return [];
  if (!phase.classes) return ["says ", make("b", {}, `${values[0].toFixed(1)} ${phase.unit}`)];
  const said = (rank) => `${phase.answers[answers[rank]]} ${percent(values[rank])}`;
  if (phase.cells > 1) {
    const hits = answers.filter((answer, cell) => answer === model.labels[image][cell]).length;
    const all = answers.map((_, cell) => said(cell)).join(" · ");
    return [`${hits} of ${phase.cells} cells right: `, make("b", {}, all)];
  }
  const right = model.labels[image].includes(answers[0]) ? "✓ right:" : "✗ wrong:";
  const others = answers.map((_, rank) => said(rank)).slice(1).join(" · ");
  return [`${right} `, make("b", {}, said(0)), make("span", { class: "quiet" }, ` · ${others}`)];
}

// How many patches have another expert.
function countWords(view) {
  const { model, shown, kind, missing } = view;
  if (missing) return [`no ${kind} was looked at in this model`];
  const small = model.kinds === null ? [] : [`; k: the ${view.phase.kinds.name}`];
  if (!kind) return small.map((words) => words.slice(2));
  if (shown === model.shown[0]) return ["clean image", ...small];
  const all = Array.from({ length: patches(model) }, (_, patch) =>
    change(view, model.special + patch));
  const compared = all.filter((one) => one.compared).length;
  const changed = all.filter((one) => one.changed).length;
  const words = [make("b", {}, `${changed} of ${compared} patches changed`)];
  if (shown.kind === "epoch") words.push(" until the end");
  if (compared < all.length) words.push(`; ${all.length - compared} are not in the clean image`);
  if (shown.picture === null && shown.kind !== "epoch") words.push("; drawn is the clean one");
  return [...words, ...small];
}

// How many patches go to an expert that is not the partner of the other model's.
function unlikeWords({ model, unlike, beside }) {
  if (!unlike) return [];
  const all = Array.from({ length: patches(model) }, (_, patch) => unlike(model.special + patch));
  const number = all.filter(Boolean).length;
  const what = model.words ? "words" : "patches";
  return [`◥ ${number} of ${all.length} ${what} go to another expert than in ${beside}; `
    + "matched experts have one colour"];
}

// How sure the router was of a token; a layer's margin is of what it chose by, a balance's bias too.
function marginWords(view, token) {
  const margin = marginOf(view, token);
  if (margin === null) return "";
  const { margin: mean } = view.known.layers[view.layer];
  const usual = mean === undefined ? "" : `; margin of the choice, layer mean ${percent(mean)}`;
  const than = `${margin < 0 ? "less" : "more"} probable than the next expert`;
  return `${percent(Math.abs(margin))} ${than}${usual}`;
}

// Which experts would have been best for a token of the clean image, where others were tried.
function bestWords({ model, shown, layer, image, known }, token) {
  const tried = known.layers[layer].best?.[image] ?? {};
  if (shown !== model.shown[0] || !Object.keys(tried).length) return "";
  if (!tried[token]) {
    const places = Object.keys(tried).map((place) => placeName(model, Number(place)));
    return `other experts were tried of: ${places.join("; ").toLowerCase()}`;
  }
  const [experts, saved] = tried[token];
  if (!experts.length) return "tried: no other experts would have been better";
  return `best: ${experts.join(", ")}, with which the loss is lower by ${saved}`;
}

function favouriteWords({ model, layer, expert }) {
  const { load, favourites } = model.layers[layer].experts[expert];
  const what = model.grid.length === 1 ? "words" : "patches";
  if (favourites.length) return `${what} for which the router is surest of it`;
  if (!load) return "nothing chose it";
  return model.words ? "" : "favourite patches are kept of the first seed";
}
