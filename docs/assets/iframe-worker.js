// Search in pages that were opened as files: browsers refuse to start a Worker from file://, so the script of the
// worker runs in a hidden frame instead, with the same messages.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inner = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== this.inner) return;
        this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        if (this.onmessage) this.onmessage(event);
      });
      const page = this.inner.document;
      page.open();
      page.write("<!doctype html><html><body></body></html>");
      page.close();
      this.inner.postMessage = (message) => window.postMessage.call(this.inner.parent, message, "*");
      this.inner.importScripts = (...urls) =>
        urls.reduce(
          (before, next) => before.then(() => load(page, next)),
          Promise.resolve(),
        );
      this.ready = load(page, url);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
    terminate() {
      this.inner.frameElement.remove();
    }
  };
  const load = (page, url) =>
    new Promise((resolve, reject) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      page.body.appendChild(script);
    });
  window.Worker = window.IFrameWorker;
}
