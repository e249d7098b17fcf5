// Search in pages that were opened as files: browsers refuse to start a Worker from file://. The script of the worker
// runs in a hidden frame instead, which gets the functions that it expects of a worker.
if (location.protocol === "file:") {
  const load = (page, url) =>
    new Promise((resolve, reject) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      page.body.appendChild(script);
    });
  const message = (data) => new MessageEvent("message", { data: structuredClone(data) });

  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => {
        const event = message(data);
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inner.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => load(inner.document, next)), Promise.resolve());
      this.ready = load(inner.document, url);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(message(data)));
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
