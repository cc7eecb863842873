// What the page knows: packed arrays, and what they say of one token.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const CHOSEN = 128; // the highest bit of a mark
const SURE = 127; // a probability of 1 in its other bits
const NOWHERE = 65535; // a patch of a view that no patch of the clean image shows
const arrays = new Map(); // place in the pool → bytes

const product = (numbers) => numbers.reduce((one, other) => one * other, 1);
const patches = (model) => product(model.grid);
const tokens = (model) => model.special + patches(model);

async function unpack(place) {
  if (arrays.has(place)) return;
  const bytes = Uint8Array.from(atob(DATA.pool[place]), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  arrays.set(place, new Uint8Array(await new Response(stream).arrayBuffer()));
}

// All arrays of a model are there once this is done.
async function unpackModel({ layers, shown }) {
  const pictures = [...layers.map((one) => one.crops), ...shown.map((one) => one.picture)];
  const places = [
    ...pictures.map((picture) => picture?.pixels ?? null),
    ...shown.flatMap((one) => [one.origins, ...one.trace.layers]),
  ];
  await Promise.all([...new Set(places)].filter((place) => place !== null).map(unpack));
}

// The arrays of a layer: see packed_record in moecore/nn/traces.py.
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

// What became of a token against the clean image in the trained model.
function change(view, token) {
  const now = bestExpert(view, token);
  const origin = originOf(view, token);
  if (origin === null) return { now, was: null, compared: false, changed: false };
  const was = bestExpert({ ...view, shown: view.model.shown[0] }, origin);
  return { now, was, compared: true, changed: now !== was };
}

// The clean image's token that shows the same; null where there is none.
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
        const channel = image * channels + (channels === 3 ? colour : 0);
        pixels.data[target + colour] = bytes[channel * all + place];
      }
      pixels.data[target + 3] = 255;
    }
  }
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}
