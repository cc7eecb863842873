// A page opened from disk may start no worker: the search's runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      const loads = new Promise((resolve) => script.addEventListener("load", resolve));
      script.src = url;
      inside.document.body.append(script);
      this.postMessage = (data) =>
        loads.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
