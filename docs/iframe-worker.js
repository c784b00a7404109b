// Browsers start no worker from a file; the search of a site opened so runs in a hidden frame.
if (location.protocol === "file:") window.Worker = window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    const inside = frame.contentWindow, page = inside.document;
    page.open();
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = page.createElement("script");
    const loaded = new Promise((done) => { script.onload = done; });
    this.postMessage = (data) => { loaded.then(() => inside.dispatchEvent(new MessageEvent("message", { data }))); };
    page.write("<!doctype html><body>");
    page.close();
    script.src = url;
    page.body.append(script);
  }
};
