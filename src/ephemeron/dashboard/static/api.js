// Requests to the dashboard, and its events.

let session = null;

export async function open() {
  session = await get("session");
  return session;
}

export async function get(path, parameters = {}) {
  const response = await fetch("/api/" + path + "?" + new URLSearchParams(parameters));
  if (!response.ok) throw new Error(await reason(response));
  return response.json();
}

export async function cells(parameters) {
  const response = await fetch("/api/run/tile?" + new URLSearchParams(parameters));
  if (!response.ok) throw new Error(await reason(response));
  const data = new Uint8Array(await response.arrayBuffer());
  return { data: data, rows: +response.headers.get("x-rows"), version: +response.headers.get("x-version") };
}

export async function post(path, body) {
  const headers = { "content-type": "application/json", [session.change_header]: session.change_value };
  const response = await fetch("/api/" + path, { method: "POST", headers: headers, body: JSON.stringify(body) });
  if (!response.ok) throw new Error(await reason(response));
  return response.json();
}

async function reason(response) {
  const text = await response.text();
  try { return JSON.parse(text).error; } catch (e) { return text || "HTTP " + response.status; }
}

// Follows a topic; returns a function that ends it.
export function follow(topic, key, ondocument, ongone) {
  const source = new EventSource("/api/stream?" + new URLSearchParams({ topic: topic, key: key }));
  source.addEventListener("document", (e) => { connected(true); ondocument(JSON.parse(e.data)); });
  source.addEventListener("gone", () => { source.close(); if (ongone) ongone(); });
  source.addEventListener("open", () => connected(true));
  source.addEventListener("error", () => { if (source.readyState !== EventSource.CLOSED) connected(false); else retry(); });
  let ended = false, again = null;
  function retry() {
    connected(false);
    if (!ended) again = setTimeout(() => { inner = follow(topic, key, ondocument, ongone); }, 2000);
  }
  let inner = null;
  return () => { ended = true; clearTimeout(again); source.close(); if (inner) inner(); };
}

function connected(is) {
  const node = document.getElementById("connection"), text = is ? "live" : "connection lost";
  if (node.textContent !== text) node.textContent = text;
  node.classList.toggle("lost", !is);
}

// Calls `work` now, and again after it has ended if it was requested meanwhile; at most once in `pause` ms.
export function throttled(work, pause) {
  let running = false, wanted = false, last = -Infinity, timer = null;
  async function run() {
    timer = null;
    running = true; wanted = false; last = performance.now();
    try { await work(); } catch (e) { console.warn(e); } finally { running = false; if (wanted) request(); }
  }
  function request() {
    if (running) { wanted = true; return; }
    if (timer === null) timer = setTimeout(run, Math.max(0, last + pause - performance.now()));
  }
  request.stop = () => { clearTimeout(timer); wanted = false; };
  return request;
}
