// Sorts tables, and shows the runs behind a number. All that comes from a record is put in as text.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const dialog = document.getElementById("runs");
const title = document.getElementById("runs-title");
const body = document.getElementById("runs-body");
const said = document.getElementById("said");

/** <tag class="...">children</tag>; children are nodes or text. */
function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Sorting

/** Rows by one column: numbers as numbers, what is missing last; equal rows keep their order. */
function sort(header) {
  const table = header.closest("table");
  const place = [...header.parentNode.children].indexOf(header);
  const up = header.getAttribute("aria-sort") !== "ascending";
  const numeric = header.classList.contains("number");
  const key = (row) => row.cells[place].dataset.by;
  const rows = [...table.tBodies[0].rows].sort((one, two) => {
    const [a, b] = [key(one), key(two)];
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
    const order = numeric ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
    return up ? order : -order;
  });
  table.tBodies[0].append(...rows);
  for (const other of header.parentNode.children) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  table.classList.add("sorted");
  said.textContent = `Sorted by ${header.innerText.trim()}, ${up ? "ascending" : "descending"}`;
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button.parentNode));
}

// Filtering: rows that have all the words

for (const table of document.querySelectorAll("table")) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 25) continue;
  const input = make("input", "filter");
  input.type = "search";
  input.placeholder = `Filter ${rows.length} rows`;
  input.setAttribute("aria-label", `Filter the rows of ${table.parentNode.getAttribute("aria-label")}`);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    said.textContent = `${rows.filter((row) => !row.hidden).length} rows`;
  });
  table.parentNode.before(input);
}

// Runs

/** The places in the pool of each run's values; data.runs has what differs from the run before. */
const runs = [];
for (const changes of data.runs) runs.push(Object.assign([...(runs.at(-1) || [])], changes));

/** The parts of a value that the page has part by part, such as the words of a command, in their order. */
function parts(values, group) {
  return data.keys.map((key, i) => [key, data.pool[values[i]] ?? null])
    .filter(([key, value]) => key.startsWith(`${group}.`) && value !== null)
    .map(([key, value]) => [key.slice(group.length + 1), value]);
}

/** The words of a list that the page has word by word. */
function joined(values, group, between) {
  return parts(values, group).sort(([a], [b]) => a - b).map(([, word]) => word).join(between);
}

/** A run as an object. */
function run(number) {
  const values = runs[number];
  const fields = Object.fromEntries(values.map((place, i) => [data.keys[i], data.pool[place]]));
  const selection = parts(values, "selection");
  const identity = joined(values, "identity", "-");
  return { ...fields, command: joined(values, "command", " ").replace("NAME", identity), identity,
    selection: selection.length ? Object.fromEntries(selection) : null };
}

/** What a run gave: its utility, or of `pubsel rank` the distances. */
function result(found) {
  if (found.utility === null) return `distance ${shown(found.distance.values)}`;
  const [low, high] = (found.utility_interval || []).map((bound) => (100 * bound).toFixed(2));
  return `${(100 * found.utility).toFixed(2)} %` + (low ? ` [${low}, ${high}]` : "");
}

function shown(value) {
  if (value === null || value === undefined) return "—";
  if (Array.isArray(value)) return value.length ? value.map(shown).join(", ") : "none";
  if (typeof value === "object") return Object.entries(value).map(([key, inner]) => `${key}: ${shown(inner)}`).join(", ");
  if (typeof value === "number" && !Number.isInteger(value)) {
    const rounded = Number(value.toPrecision(6));
    return Math.abs(rounded) < 1e-3 ? rounded.toExponential() : String(rounded);
  }
  return String(value);
}

/** Names and values; empty for none. */
function list(entries) {
  const found = entries.filter(([, value]) => value !== undefined);
  return make("dl", "values", ...found.map(([name, value]) => {
    const text = shown(value);
    return make("div", name.length + text.length > 34 ? "wide" : "", make("dt", "", name), make("dd", "", text));
  }));
}

function part(name, open, ...children) {
  const node = make("details", "part", make("summary", "", name), ...children);
  node.open = open;
  return node;
}

function commandOf(text) {
  const code = make("code", "", text);
  const button = make("button", "copy", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // no permission, as from file: in some browsers
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return make("div", "command", make("pre", "", code), button);
}

/** Settings, group by group. */
function settings(record) {
  const groups = { "": [] };
  for (const [key, value] of Object.entries(record)) {
    if (!key.startsWith("settings.")) continue;
    const name = key.slice("settings.".length);
    if (value !== null && typeof value === "object" && !Array.isArray(value)) groups[name] = Object.entries(value);
    else groups[""].push([name, value]);
  }
  return Object.entries(groups).map(([name, entries]) => make("div", "group", name && make("h4", "", name), list(entries)));
}

const SAID = ["privacy.statement", "privacy.valid", "privacy.weak", "privacy.not_covered"];
const FIRST = ["epsilon", "delta", "claimed_epsilon", "sensitivity", "noise_multiplier", "steps", "sampling", "sampling_rate",
  "accountant", "noise_source", "adjacency"].map((key) => `privacy.${key}`);

function guarantee(record) {
  const valid = record["privacy.valid"] === true;
  const weak = record["privacy.weak"] === true || record["privacy.delta"] * record.private_examples > 1 + 1e-9;
  const statement = record["privacy.statement"] || "The record states no guarantee.";
  const keys = Object.keys(record).filter((key) => key.startsWith("privacy.") && !SAID.includes(key));
  const numbers = [...new Set([...FIRST, ...keys])].filter((key) => record[key] !== undefined && record[key] !== null)
    .map((key) => [key.slice("privacy.".length).replaceAll("_", " "), record[key]]);
  const outside = record["privacy.not_covered"] || [];
  return [
    make("p", valid && !weak ? "guarantee valid" : "guarantee invalid",
      make("b", "", !valid ? "No valid guarantee. " : weak ? "Weak guarantee: delta is above 1/n. " : "Valid guarantee. "),
      statement),
    list(numbers),
    outside.length ? make("div", "outside", make("h4", "", "Not covered"),
      make("ul", "", ...outside.map((text) => make("li", "", text)))) : null,
  ];
}

/** Everything that a record says, the command first. */
function record(found, open) {
  const distance = found.distance;
  const node = make("details", "run",
    make("summary", "", make("span", "seed", `seed ${shown(found.seed)}`),
      make("span", "result", result(found)), make("span", "identity", found.identity)),
    make("h3", "", "The command that repeats it"), commandOf(found.command),
    make("h3", "", "Privacy"), ...guarantee(found),
    part("Settings", true, ...settings(found)),
    distance ? part("Distance", false, list([["name", distance.name], ["mean", distance.mean], ["standard deviation", distance.std],
      ["values", distance.values], ["k", distance.k], ["m", distance.m], ["privacy", distance.privacy]])) : null,
    part("Data, code and machine", false, list([
      ["metric", found.metric], ["private examples", found.private_examples], ["test examples", found.test_examples],
      ["public labels", found.public_labels], ["trained parameters", found.parameters], ["selection", found.selection],
      ["notes", found.notes], ["finished", found.finished], ["seconds", found.seconds], ["device", found.device],
      ["hardware", found.hardware], ["threads", found.threads], ["commit", found.commit], ["versions", found.versions],
      ["weights", found.weights]])));
  node.open = open;
  node.id = `run/${found.identity}`;
  return node;
}

function heading(found) {
  const one = (key) => [...new Set(found.map((record) => shown(record[key])))];
  const publics = one("public").filter((name) => name !== "—");
  if (one("algorithm")[0] === "—") return `Distance of ${publics.join(", ")} to ${one("private").join(", ")}`;
  const epsilons = one("epsilon").map((value) => (value === "—" ? "∞" : value));
  return `${one("algorithm").join(", ")} on ${one("private").join(", ")}` +
    (publics.length ? ` with public ${publics.join(", ")}` : " without public data") + `, ε ${epsilons.join(", ")}`;
}

/** What stands behind a key such as gsd_table2/3, or run/IDENTITY; null where nothing does. */
function behind(key) {
  if (key.startsWith("run/")) {
    const number = runs.findIndex((values) => joined(values, "identity", "-") === key.slice("run/".length));
    return number < 0 ? null : [run(number)];
  }
  return Object.hasOwn(data.behind, key) ? data.behind[key].map(run) : null;
}

/** The part of the address behind #, as it was before it was encoded. */
function address() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

let origin = null;  // what had the focus before the dialog

function follow() {
  const key = address();
  const found = behind(key);
  if (!found) {
    if (dialog.open) dialog.close();
    return;
  }
  title.textContent = heading(found);
  const count = found.length === 1 ? "One run" : `${found.length} runs`;
  body.replaceChildren(make("p", "count", `${count} behind this number`), ...found.map((one, i) => record(one, i === 0)));
  if (!dialog.open) {
    origin = document.querySelector(`a[href="#${CSS.escape(key)}"]:not([tabindex])`) || document.activeElement;
    dialog.showModal();
  }
  body.scrollTop = 0;
  title.focus();
}

dialog.addEventListener("close", () => {
  if (behind(address())) history.replaceState(null, "", location.pathname + location.search);
  if (origin) origin.focus();
});
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
document.getElementById("close").addEventListener("click", () => dialog.close());
addEventListener("hashchange", follow);
follow();

// On a narrow page the contents start folded.
if (matchMedia("(max-width: 60rem)").matches) document.querySelector("nav details").open = false;
