/* Search works in pages that are opened from a folder, where browsers start no worker: an iframe takes its place. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow.document;
      inside.open();
      inside.write(`<body><script>
        postMessage = parent.postMessage.bind(parent);
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(done => {
          const script = document.createElement("script");
          script.src = url; script.onload = done; document.body.appendChild(script);
        })), Promise.resolve());
      <\/script><script src="${url}"><\/script></body>`);
      inside.close();
      this.ready = new Promise(done => { this.frame.onload = done; });
      this.heard = event => {
        if (event.source !== this.frame.contentWindow) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      addEventListener("message", this.heard);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      removeEventListener("message", this.heard);
      this.frame.remove();
    }
  };
}
