// The controls above and the images beside; ``state`` and what reads it are in explorer.js.

let inStrip = null; // the model whose images are there

function fillControls(shown) {
  const methods = phaseNow().methods.map(({ name, model }) =>
    model ? [name, name] : [name, `${name} (no experts: nothing to see)`, true]);
  const layers = Math.max(1, ...shown.map((model) => model.layers.length));
  const places = Array.from({ length: layers }, (_, place) => [place, `${place + 1} of ${layers}`]);
  const labels = stepLabels(shown);
  fill("phase", DATA.phases.map((phase, place) => [place, phase.title]), state.phase);
  find("phase-label").hidden = DATA.phases.length < 2;
  fill("method", methods, state.method);
  fill("beside", [["", "nothing"], ...methods], state.beside);
  fill("layer", places, state.layer);
  fill("kind", kindsOf(shown).map((kind) => [kind, KINDS[kind].name]), state.kind);
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
    images.replaceChildren(...model.images.map((_, image) => {
      const canvas = make("canvas", { "aria-hidden": "true" });
      const words = labelWords(phaseNow(), model, image);
      paint(canvas, model.shown[0].picture, image, plane, 0.5);
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
  const words = make("b", {}, labelWords(phaseNow(), model, state.image));
  find("truth").replaceChildren(words, `, number ${model.images[state.image]} of the test split`);
}
