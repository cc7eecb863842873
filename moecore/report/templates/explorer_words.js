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
  const words = `${placeName(view.model, token)}: expert ${now ?? "none"}`;
  return changed ? `${words}; ${where(view.shown).toLowerCase()} ${was ?? "none"}` : words;
}

function labelWords(phase, model, image) {
  const labels = model.labels[image];
  if (phase.classes) return labels.map((place) => phase.answers[place]).join(", ");
  return `${phase.answers[0]} ${labels[0].toFixed(1)} ${phase.unit}`;
}

function answerWords({ model, shown, image, phase }) {
  const answers = shown.trace.answers[image];
  const values = shown.trace.values[image];
  if (!phase.classes) return ["says ", make("b", {}, `${values[0].toFixed(1)} ${phase.unit}`)];
  const said = (rank) => `${phase.answers[answers[rank]]} ${percent(values[rank])}`;
  const right = model.labels[image].includes(answers[0]) ? "✓ right:" : "✗ wrong:";
  const others = answers.map((_, rank) => said(rank)).slice(1).join(" · ");
  return [`${right} `, make("b", {}, said(0)), make("span", { class: "quiet" }, ` · ${others}`)];
}

// How many patches have another expert.
function countWords(view) {
  const { model, shown, kind, missing } = view;
  if (missing) return [`no ${kind} was looked at in this model`];
  if (shown === model.shown[0]) return ["clean image"];
  const all = Array.from({ length: patches(model) }, (_, patch) =>
    change(view, model.special + patch));
  const compared = all.filter((one) => one.compared).length;
  const changed = all.filter((one) => one.changed).length;
  const words = [make("b", {}, `${changed} of ${compared} patches changed`)];
  if (shown.kind === "epoch") words.push(" until the end");
  if (compared < all.length) words.push(`; ${all.length - compared} are not in the clean image`);
  if (shown.picture === null && shown.kind !== "epoch") words.push("; drawn is the clean one");
  return words;
}
