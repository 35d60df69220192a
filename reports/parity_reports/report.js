"use strict";

// Draws the case list, the layer map and the numbers panel from the JSON in the page. The address
// is the only state: #case=…&oracle=…&cell=…. Text from the run goes through textContent alone.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const wordFields = new Set(data.word_fields);
let drawn = null; // the case and oracle on show
let cellNodes = new Map(); // full tap name -> its cell in the map

function element(name, classes = "", text = "", ...children) {
  const node = document.createElement(name);
  if (classes) node.className = classes;
  if (text !== "") node.textContent = text;
  node.append(...children);
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "not measured";
  if (typeof value !== "number") return String(value);
  if (value === 0 || (Number.isInteger(value) && Math.abs(value) < 1e7)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e5 ? String(+value.toPrecision(3)) : value.toExponential(2).replace(/\.?0+e/, "e");
}

const fullName = (cell) => (cell.layer === null ? cell.tap : `layers.${cell.layer}.${cell.tap}`);

function decode(row) {
  const cell = {};
  data.fields.forEach((field, i) => {
    cell[field] = wordFields.has(field) && row[i] !== null ? data.words[row[i]] : row[i];
  });
  return cell;
}

function address(name, oracle, cell) {
  const parameters = new URLSearchParams({ case: name, oracle });
  if (cell) parameters.set("cell", cell);
  return "#" + parameters;
}

// What the address asks for, with the first divergence, then the first case, where it is silent.
function chosen() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const name = asked.get("case") ?? data.first?.case;
  const found = data.cases.find((item) => item.name === name) ?? data.cases[0];
  const oracles = Object.keys(found.pairs);
  const failing = oracles.find((oracle) => found.pairs[oracle].state === "fails");
  const wished = asked.get("oracle") ?? (asked.has("case") ? null : data.first?.oracle);
  const oracle = oracles.includes(wished) ? wished : failing ?? oracles[0];
  return { found, oracle, cell: asked.get("cell") };
}

function mark(state) {
  const node = element("span", `mark ${state}`, data.states[state]);
  node.setAttribute("aria-hidden", "true");
  return node;
}

const stateWords = { fails: "fails", within: "within the policy", identical: "identical", none: "not compared" };

function drawCases() {
  const list = byId("cases");
  for (const item of data.cases) {
    const link = element("a");
    const oracles = Object.keys(item.pairs);
    const failing = oracles.find((oracle) => item.pairs[oracle].state === "fails");
    link.href = address(item.name, failing ?? oracles[0] ?? "");
    link.dataset.name = item.name;
    const marks = element("span", "marks");
    for (const oracle of oracles) marks.append(mark(item.pairs[oracle].state));
    const rest = [item.checkpoint, item.generation, item.dtype].filter(Boolean).join(" / ");
    link.append(element("span", "program", item.program ?? item.name), marks, element("span", "rest", rest));
    const said = oracles.map((oracle) => `${oracle} ${stateWords[item.pairs[oracle].state]}`);
    link.title = `${item.name}\n${said.join("\n")}`;
    link.setAttribute("aria-label", `${item.name}: ${said.join(", ")}`);
    list.append(element("li", "", "", link));
  }
  byId("filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const link of list.querySelectorAll("a")) {
      const match = words.every((word) => link.dataset.name.toLowerCase().includes(word));
      link.parentElement.hidden = !match;
      shown += match;
    }
    byId("none-match").hidden = shown > 0;
  });
}

function drawTabs(found, current) {
  const tabs = Object.entries(found.pairs).map(([oracle, pair]) => {
    const link = element("a", "", "", mark(pair.state), element("span", "", oracle));
    link.href = address(found.name, oracle);
    link.setAttribute("aria-label", `${oracle}: ${stateWords[pair.state]}`);
    if (oracle === current) link.setAttribute("aria-current", "true");
    return link;
  });
  byId("oracles").replaceChildren(...tabs);
}

// How much of its bound a cell uses, in five steps; where there is no bound, its distance in ulp.
function level(cell) {
  const steps = cell.bound ? [0.125, 0.25, 0.5, 0.75] : [1, 2, 4, 16];
  const size = cell.bound ? cell.candidate_to_truth / cell.bound : cell.max_ulp;
  return 1 + steps.filter((step) => size > step).length;
}

function cellClass(cell) {
  if (cell.verdict === "identical" || cell.verdict === "missing") return cell.verdict;
  return data.verdicts[cell.verdict].fails ? "fails" : `level${level(cell)}`;
}

function drawCell(cell, node) {
  const { symbol, meaning } = data.verdicts[cell.verdict];
  const name = fullName(cell);
  const { case: firstCase, oracle, tap } = data.first ?? {};
  const first = tap === name && firstCase === drawn.found.name && oracle === drawn.oracle;
  node.className += ` cell ${cellClass(cell)}${first ? " first-divergence" : ""}`;
  node.textContent = symbol;
  node.title = `${name}: ${cell.verdict}`;
  node.tabIndex = -1;
  node.dataset.cell = name;
  node.setAttribute("role", "gridcell");
  node.setAttribute("aria-selected", "false");
  node.setAttribute("aria-label", `${name}: ${cell.verdict}, ${meaning}${first ? ", first divergence" : ""}`);
  cellNodes.set(name, node);
  return first;
}

function gap(name) {
  const node = element(name, "gap");
  node.setAttribute("aria-hidden", "true");
  return node;
}

function drawHead(columns) {
  const groups = element("tr");
  const corner = element("th", "corner", "layer");
  corner.rowSpan = 2;
  groups.append(corner);
  for (const group of data.groups) {
    groups.append(gap("th"));
    const title = element("span", "", group.taps.length > 1 ? group.title : "");
    const node = element("th", "group", "", title);
    if (group.taps.length === 1) node.className += " single";
    node.colSpan = group.taps.length;
    node.scope = "colgroup";
    groups.append(node);
  }
  const taps = element("tr");
  for (const column of columns) {
    const { group, tap, start } = column;
    if (start) taps.append(gap("th"));
    const short = group.layer_type ? tap.slice(tap.indexOf(".") + 1) : tap;
    column.head = element("th", "tap", "", element("span", "", short));
    column.head.scope = "col";
    column.head.title = tap;
    taps.append(column.head);
  }
  return element("thead", "", "", groups, taps);
}

function rowHead(label, type) {
  const kind = element("span", type === "full_attention" ? "kind full" : "kind", data.types[type] ?? type ?? "?");
  const node = element("th", "row", "", element("b", "", label), kind);
  node.scope = "row";
  return node;
}

function drawMap(found, oracle) {
  const cells = found.pairs[oracle].cells.map(decode);
  const columns = data.groups.flatMap((group) => group.taps.map((tap, i) => ({ group, tap, start: i === 0 })));
  const table = element("table", "map");
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", `Verdicts by layer and tensor, ${found.name} against ${oracle}`);
  const [before, body, after] = [element("tbody"), element("tbody"), element("tbody")];
  table.append(drawHead(columns), before, body, after);

  const modelRow = (into) => (cell) => {
    const node = element("td");
    const label = element("th", "row", cell.tap);
    label.scope = "row";
    label.title = cell.tap;
    if (drawCell(cell, node)) label.className += " here";
    into.append(element("tr", "", "", label, gap("td"), node));
  };
  const layers = new Map();
  for (const cell of cells) {
    if (cell.layer === null) continue;
    if (!layers.has(cell.layer)) layers.set(cell.layer, new Map());
    layers.get(cell.layer).set(cell.tap, cell);
  }
  const ofModel = cells.filter((cell) => cell.layer === null);
  ofModel.filter((cell) => cell.tap === "embed_tokens").forEach(modelRow(before));
  for (const [layer, taps] of [...layers].sort(([a], [b]) => a - b)) {
    const type = found.layer_types?.[layer];
    const label = rowHead(String(layer), type);
    const row = element("tr", "", "", label);
    for (const { group, tap, start, head: columnHead } of columns) {
      const node = element("td");
      if (start) row.append(gap("td"));
      const cell = taps.get(tap);
      if (cell && drawCell(cell, node)) {
        label.className += " here";
        columnHead.className += " here";
      } else if (!cell && (!group.layer_type || group.layer_type === type)) {
        node.className += " empty";
        node.title = `${tap}: not compared`;
      }
      row.append(node);
    }
    body.append(row);
  }
  ofModel.filter((cell) => cell.tap !== "embed_tokens").forEach(modelRow(after));
  table.addEventListener("click", (event) => open(event.target.closest("td.cell")));
  table.addEventListener("keydown", onKey);
  return table;
}

function open(node) {
  if (node) location.hash = address(drawn.found.name, drawn.oracle, node.dataset.cell);
}

function close() {
  history.replaceState(null, "", address(drawn.found.name, drawn.oracle));
  show();
}

// One cell of the map is in the tab order; arrows move among the cells that exist.
function focusable(node) {
  for (const other of cellNodes.values()) other.tabIndex = other === node ? 0 : -1;
}

function onKey(event) {
  const node = event.target.closest("td.cell");
  if (!node) return;
  if (event.key === "Enter" || event.key === " ") open(node);
  else if (event.key === "Escape") close();
  else {
    const next = neighbour(node, event.key);
    if (next === undefined) return;
    if (next) {
      focusable(next);
      next.focus();
    }
  }
  event.preventDefault();
}

// Scrolls the map, and never the page, until the cell is in its middle.
function reveal(node) {
  const scroller = byId("scroll");
  const [outer, inner] = [scroller.getBoundingClientRect(), node.getBoundingClientRect()];
  scroller.scrollLeft += inner.left - outer.left - outer.width / 2;
  scroller.scrollTop += inner.top - outer.top - outer.height / 2;
}

function neighbour(node, key) {
  const row = node.parentElement;
  const inRow = [...row.querySelectorAll("td.cell")];
  const at = inRow.indexOf(node);
  if (key === "ArrowRight") return inRow[at + 1] ?? null;
  if (key === "ArrowLeft") return inRow[at - 1] ?? null;
  if (key === "Home") return inRow[0];
  if (key === "End") return inRow[inRow.length - 1];
  if (key !== "ArrowDown" && key !== "ArrowUp") return undefined;
  const other = row.closest("table").rows[row.rowIndex + (key === "ArrowDown" ? 1 : -1)];
  const there = [...(other?.querySelectorAll("td.cell") ?? [])];
  const distance = (cell) => Math.abs(cell.cellIndex - node.cellIndex);
  return there.sort((a, b) => distance(a) - distance(b))[0] ?? null;
}

function drawLegend(found, oracle) {
  const used = new Set(found.pairs[oracle].cells.map((row) => decode(row).verdict));
  const items = [];
  const bounded = found.pairs[oracle].cells.map(decode).some((cell) => cell.bound);
  for (const [verdict, { symbol, meaning, fails }] of Object.entries(data.verdicts)) {
    if (!used.has(verdict)) continue;
    const ramp = element("span", "ramp");
    const kind = verdict === "identical" || verdict === "missing" ? verdict : fails ? "fails" : "";
    const shades = kind ? [kind] : [1, 2, 3, 4, 5].map((step) => `level${step}`);
    for (const shade of shades) ramp.append(element("span", `swatch ${shade}`, symbol));
    const scale = kind ? "" : bounded ? "; stronger: more of its bound used" : "; stronger: more ulp";
    items.push(element("li", "", "", ramp, `${verdict}: ${meaning}${scale}`));
  }
  if ([...cellNodes.values()].some((node) => node.classList.contains("first-divergence")))
    items.push(element("li", "", "", element("span", "swatch outlined"), "first divergence"));
  byId("legend").replaceChildren(...items);
}

function facts(rows) {
  const list = element("dl", "facts");
  for (const [label, value] of rows) {
    if (value) list.append(element("div", "", "", element("dt", "", label), element("dd", "", value)));
  }
  return list;
}

// Errors span decades, so the bars are logarithmic, with the longest at the largest number.
function errorBars(cell) {
  const rows = [
    ["candidate → truth", cell.candidate_to_truth, cell.bound && cell.candidate_to_truth > cell.bound ? "over" : ""],
    ["oracle → truth", cell.oracle_to_truth, ""],
    ["candidate → oracle", cell.candidate_to_oracle, ""],
    ["rounding → truth", cell.rounding_to_truth, ""],
    ["bound", cell.bound, "bound"],
  ];
  const positive = rows.map((row) => row[1]).filter((value) => value > 0);
  const low = Math.log10(Math.min(...positive)) - 0.7;
  const high = Math.log10(Math.max(...positive));
  const list = element("dl", "errors");
  for (const [label, value, kind] of rows) {
    const track = element("dd", `track ${kind}`);
    const fill = element("div", "fill");
    fill.style.width = value > 0 ? `${(100 * (Math.log10(value) - low)) / (high - low)}%` : "0";
    track.append(fill);
    track.setAttribute("aria-hidden", "true");
    list.append(element("dt", "", label), element("dd", "", number(value)), track);
  }
  list.append(element("p", "caption", "relative RMS errors; the bars are logarithmic"));
  return list;
}

const attributions = {
  makes: "makes the difference: its inputs agree bit for bit, its result does not",
  carries: "carries the difference: one of its inputs already fails",
};
const requirements = {
  identical: "identical, bit for bit",
  ulp: "a distance in ulp that the policy allows",
  arbitrated: "error against float64 within the bound",
};

function drawPanel(found, oracle, name) {
  const panel = byId("panel");
  const row = name && found.pairs[oracle].cells.map(decode).find((cell) => fullName(cell) === name);
  panel.hidden = !row;
  panel.replaceChildren();
  for (const [key, node] of cellNodes) node.setAttribute("aria-selected", String(Boolean(row) && key === name));
  if (!row) return;
  const { symbol, meaning, fails } = data.verdicts[row.verdict];
  const button = element("button", "", "Close");
  button.type = "button";
  button.addEventListener("click", () => {
    close();
    cellNodes.get(name)?.focus();
  });
  const badge = element("span", `swatch ${cellClass(row)}`, symbol);
  badge.setAttribute("aria-hidden", "true");
  const step = row.step === null ? "" : [row.step, found.steps?.[row.step]].filter((x) => x !== undefined).join(": ");
  const left = facts([
    ["verdict", `${row.verdict}: ${meaning}`],
    ["step", step && `${step} (${fails ? "first that fails" : "largest error"} of ${row.compared} compared)`],
    ["max ulp", number(row.max_ulp)],
    ["max abs", number(row.max_abs)],
    ["requires", requirements[row.require] ?? row.require],
    ["because", row.reason],
    ["blame", attributions[row.attribution] ?? row.attribution],
    ["detail", row.detail],
  ]);
  panel.append(
    element("header", "", "", badge, element("h3", "", name), button),
    element("div", "grid", "", left, errorBars(row)),
  );
  panel.scrollIntoView({ block: "nearest" });
}

function show() {
  const { found, oracle, cell } = chosen();
  if (drawn?.found !== found || drawn?.oracle !== oracle) {
    drawn = { found, oracle };
    cellNodes = new Map();
    byId("map-title").textContent = found.name;
    for (const link of byId("cases").querySelectorAll("a")) {
      if (link.dataset.name === found.name) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    drawTabs(found, oracle);
    const pair = found.pairs[oracle];
    const fed = { free: "each runner feeds itself", layer: "each layer is fed the oracle's own input" }[pair?.feed];
    byId("note").textContent = !pair
      ? "No oracle judged this case."
      : pair.not_compared
        ? `Not compared: ${pair.not_compared}`
        : `${number(pair.compared)} compared, ${number(pair.failed)} failed${fed ? `; ${fed}` : ""}`;
    byId("scroll").replaceChildren();
    byId("legend").replaceChildren();
    if (pair?.cells.length) {
      byId("scroll").append(drawMap(found, oracle));
      drawLegend(found, oracle);
      const first = byId("scroll").querySelector(".first-divergence");
      focusable(first ?? cellNodes.values().next().value);
      if (first) reveal(first);
    }
  }
  const node = cellNodes.get(cell);
  if (node) focusable(node);
  drawPanel(found, oracle, cell);
}

for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // no clipboard here: leave it selected
      button.textContent = "Selected";
    }
  });
}

if (data.cases.length) {
  if (data.first && byId("show-first")) byId("show-first").href = address(data.first.case, data.first.oracle, data.first.tap);
  drawCases();
  show();
  addEventListener("hashchange", show);
}
