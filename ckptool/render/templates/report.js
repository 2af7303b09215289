"use strict";
const $ = (id) => document.getElementById(id), SVG = "http://www.w3.org/2000/svg";
const make = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};
const say = (text) => { $("status").textContent = text; };

// Text, as Python's `printable`, `number`, `size` and `quoted` give it.
const escaped = (c) => {
  const short = { "\t": "\\t", "\n": "\\n", "\r": "\\r" }[c], n = c.codePointAt(0), hex = n.toString(16);
  return short || (n < 256 ? "\\x" + hex.padStart(2, "0") : n < 65536 ? "\\u" + hex.padStart(4, "0") : "\\U" + hex.padStart(8, "0"));
};
const printable = (text) => text.replace(/[\p{C}\p{Z}]/gu, (c) => c === " " ? c : escaped(c));
const commas = (n) => String(n).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
function number(value, isFloat = true, digits = 5) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (!isFloat) return commas(value);
  if (value === 0) return "0";
  const [lead, power] = value.toExponential(digits - 1).split("e"), e = Number(power);
  if (e >= -4 && e < digits) return String(Number(value.toPrecision(digits)));
  return `${Number(lead)}e${e < 0 ? "-" : "+"}${String(Math.abs(e)).padStart(2, "0")}`;
}
function size(bytes) {
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    const v = bytes / unit;
    if (v >= 0.9995) return `${v.toFixed(v >= 99.95 ? 0 : v >= 9.995 ? 1 : 2)} ${name}`;
  }
  return `${bytes} B`;
}
function quoted(text) {
  if (printable(text) === text) return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`;
  const bytes = (c) => [...new TextEncoder().encode(c)].map((b) => "\\x" + b.toString(16).padStart(2, "0")).join("");
  return `$'${[...text].map((c) => printable(c) !== c ? bytes(c) : "\\'".includes(c) ? "\\" + c : c).join("")}'`;
}

// Search: a glob of the command line where a word has one of * ? [, else a part of the name; re: is an expression.
const literal = (c) => c.replace(/[\\^$.*+?()[\]{}|\/]/gu, "\\$&"), inside = (c) => c === "-" ? "\\-" : literal(c);
function glob(pattern) {  // as Python's fnmatch reads it
  const signs = [...pattern];
  let made = "";
  for (let i = 0; i < signs.length;) {
    const sign = signs[i++];
    if (sign !== "[") { made += sign === "*" ? ".*" : sign === "?" ? "." : literal(sign); continue; }
    let end = i + (signs[i] === "!" ? 1 : 0);
    end = signs.indexOf("]", signs[end] === "]" ? end + 1 : end);
    if (end < 0) { made += "\\["; continue; }
    const not = signs[i] === "!";
    made += set(signs.slice(not ? i + 1 : i, end), not);
    i = end + 1;
  }
  return new RegExp(`^(?:${made})$`, "su");
}
function set(signs, not) {
  let made = "";
  for (let i = 0; i < signs.length;) {
    const ranged = signs[i + 1] === "-" && i + 2 < signs.length, end = signs[ranged ? i + 2 : i];
    if (!ranged) made += inside(end);
    else if (signs[i].codePointAt(0) <= end.codePointAt(0)) made += `${inside(signs[i])}-${inside(end)}`;
    i += ranged ? 3 : 1;
  }
  return made ? `[${not ? "^" : ""}${made}]` : not ? "." : "(?!)";
}
function test(query) {
  if (query.startsWith("re:")) {
    const found = new RegExp(query.slice(3).replaceAll("(?P<", "(?<").replaceAll("\\Z", "$").replaceAll("\\A", "^"), "u");
    return (short, full) => found.test(short) || found.test(full);
  }
  const tests = query.split(/\s+/).filter(Boolean).map((word) => {
    if (!/[*?[]/.test(word)) return (short, full) => full.includes(word);
    const whole = glob(word);
    return (short, full) => whole.test(short) || whole.test(full);
  });
  return (short, full) => tests.every((matches) => matches(short, full));
}

let table, columns, shown = [], sort = ["", 1], open = -1, cursor = 0;
const ROW = 30, DETAILS = 300;
const short = (i) => { const at = table.parts[columns.part[i]].at; return at && columns.name[i].startsWith(at) ? columns.name[i].slice(at.length + 1) || columns.name[i] : columns.name[i]; };
const isFloat = (i) => /^(f|bf|c)\d/.test(columns.dtype[i]);
const share = (i) => { const change = columns.change[i]; return !change ? -2 : change.length > 2 ? change[1] / change[2] : change[0].startsWith("same") ? -1 : 2; };
const named = (i) => table.parts.length > table.files.length && !$("part").value.startsWith("part:") ? columns.name[i] : short(i);  // two parts may have the same names
const partName = (p) => `${table.files.length > 1 ? "AB"[p.file] + " · " : ""}${printable(p.at) || p.is}`;
const changeText = (i) => { const c = columns.change[i]; return !c ? "" : c.length > 2 ? `${c[0]}: ${commas(c[1])} of ${commas(c[2])}` : c[0]; };
const shapeText = (i) => columns.shape[i] ? `[${columns.shape[i].join(", ")}]` : "";
// Name, title, width, text of a row, key to sort by, whether narrow screens leave it out.
const FIELDS = [
  ["name", "name", "name", (i) => printable(named(i)), (i) => columns.name[i]],
  ["change", "change", "change", changeText, share],
  ["dtype", "dtype", "dtype", (i) => columns.dtype[i], (i) => columns.dtype[i], 1],
  ["shape", "shape", "shape", shapeText, (i) => (columns.shape[i] || []).reduce((a, b) => a * b, 1)],
  ["bytes", "bytes", "num", (i) => size(columns.bytes[i]), (i) => columns.bytes[i]],
  ...["min", "max", "mean", "std", "norm"].map((name) => [name, name, "num", (i) => number(columns[name][i], name !== "min" && name !== "max" || isFloat(i), 4), (i) => columns[name][i], name[0] === "m" ? 2 : 1]),
  ["zeros", "zeros", "num", (i) => columns.zeros[i] === null ? "–" : columns.zeros[i] ? `${(100 * columns.zeros[i] / columns.count[i]).toFixed(1)}%` : "0", (i) => columns.zeros[i] / columns.count[i], 2],
  ["odd", "NaN, Inf", "num", (i) => columns.nans[i] === null ? "–" : commas(columns.nans[i] + columns.infs[i]), (i) => columns.nans[i] + columns.infs[i], 1],
  ["hist", "histogram", "hist", histogram, null, 1],
  ["thumb", "means", "thumb", thumbnail, null, 1],
];

function histogram(i) {
  const bars = columns.hist[i];
  if (!bars) return "";
  const node = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  node.setAttribute("viewBox", `0 0 ${bars.length * 3} 35`);
  node.setAttribute("preserveAspectRatio", "none");
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", `histogram from ${number(columns.min[i])} to ${number(columns.max[i])}`);
  path.setAttribute("d", [...bars].map((c, x) => { const y = parseInt(c, 36); return y ? `M${x * 3} 35v-${y}h2.4v${y}z` : ""; }).join(""));
  node.append(path);
  return node;
}
function thumbnail(i) {
  if (!columns.thumb[i]) return "";
  const [height, width, scale, shades] = columns.thumb[i], canvas = make("canvas", { width, height });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `means of ${height} by ${width} blocks, from -${scale} to ${scale}`);
  const dark = getComputedStyle(document.body).backgroundColor.match(/\d+/)[0] < 128, pen = canvas.getContext("2d");
  const ends = dark ? [[88, 166, 255], [34, 38, 43], [255, 166, 77]] : [[14, 92, 173], [246, 246, 245], [190, 90, 10]];
  const pixels = pen.createImageData(width, height);
  for (let k = 0; k < shades.length; k++) {
    const v = (parseInt(shades[k], 16) - 7) / 7, none = v > 1, t = Math.abs(v), end = v < 0 ? ends[0] : ends[2];
    for (let c = 0; c < 3; c++) pixels.data[4 * k + c] = none ? [200, 0, 120][c] : ends[1][c] + (end[c] - ends[1][c]) * t;
    pixels.data[4 * k + 3] = 255;
  }
  pen.putImageData(pixels, 0, 0);
  return canvas;
}

// The table: only the rows in sight are there, under the number that each would have.
const fields = () => FIELDS.filter(([name]) => (name !== "change" || table.diff));
function head() {
  $("heads").replaceChildren(...fields().map(([name, title, width, , key, optional]) => {
    const cell = make("th", { scope: "col", className: `f-${name} w-${width}${width === "num" ? " num" : ""}${optional ? ` opt opt${optional}` : ""}` });
    if (key) {
      cell.append(make("button", { textContent: title, onclick: () => order(name) }));
      if (sort[0] === name) cell.setAttribute("aria-sort", sort[1] > 0 ? "ascending" : "descending");
    } else cell.append(make("button", { textContent: title, disabled: true }));
    return cell;
  }));
}
function order(name) {
  const first = ["name", "dtype"].includes(name) ? 1 : -1;
  sort = sort[0] !== name ? [name, first] : sort[1] === first ? [name, -first] : ["", 1];
  const focused = [...$("heads").children].findIndex((cell) => cell.contains(document.activeElement));
  head();
  if (focused >= 0) $("heads").children[focused].firstChild.focus();
  find();
}
function find() {
  const began = performance.now();
  let matches;
  try { matches = test($("search").value.trim()); } catch (error) { say(`Not an expression: ${error.message}`); return; }
  const wanted = $("part").value.split(":"), within = (p) => wanted[0] === "all" || (wanted[0] === "file" ? table.parts[p].file === +wanted[1] : p === +wanted[1]);
  shown = columns.name.map((_, i) => i).filter((i) => within(columns.part[i]) && matches(short(i), columns.name[i]));
  const field = FIELDS.find(([name]) => name === sort[0]);
  if (field) {
    const keys = columns.name.map((_, i) => i), value = field[4], texts = new Intl.Collator("en", { numeric: true });
    const got = new Map(shown.map((i) => { const v = value(i); return [i, typeof v === "string" && !["name", "dtype"].includes(sort[0]) ? Number(v) : v]; }));
    const none = (v) => v === null || v === undefined || v !== v;
    shown.sort((a, b) => { const x = got.get(a), y = got.get(b); return none(x) || none(y) ? none(x) - none(y) || keys[a] - keys[b] : (typeof x === "string" ? texts.compare(x, y) : x - y) * sort[1] || a - b; });
  }
  open = -1; cursor = 0;
  $("grid").scrollTop = 0;
  draw();
  const bytes = shown.reduce((sum, i) => sum + (columns.tied[i] ? 0 : columns.bytes[i]), 0);
  say(`${commas(shown.length)} of ${commas(columns.name.length)} tensors, ${size(bytes)}${field ? `; sorted by ${field[1]}, ${sort[1] > 0 ? "ascending" : "descending"}` : ""}`);
  $("grid").dataset.ms = performance.now() - began;
}
const rows = new Map();
function row(place) {
  const i = shown[place];
  if (rows.has(i)) return rows.get(i);
  const line = make("tr");
  for (const [name, , width, text, , optional] of fields()) {
    const cell = make(name === "name" ? "th" : "td", { className: `f-${name}${width === "num" ? " num" : ""}${optional ? ` opt opt${optional}` : ""}` }), value = text(i);
    if (name === "name") {
      cell.scope = "row";
      cell.append(make("button", { title: value.slice(0, 1000), onclick: () => toggle(i) }, make("bdi", { dir: "ltr", textContent: value.length > 300 ? "…" + value.slice(-299) : value })));
    } else cell.append(value);
    line.append(cell);
  }
  rows.set(i, line);
  return line;
}
const top_ = (place) => place * ROW + (open >= 0 && shown.indexOf(open) < place ? DETAILS : 0);
function draw() {
  const grid = $("grid"), opened = shown.indexOf(open), whole = shown.length * ROW + (opened >= 0 ? DETAILS : 0);
  const at = (y) => opened >= 0 && y > (opened + 1) * ROW ? Math.max((y - DETAILS) / ROW, opened) : y / ROW;
  const from = Math.max(Math.floor(at(grid.scrollTop)) - 8, 0), to = Math.min(Math.ceil(at(grid.scrollTop + grid.clientHeight)) + 8, shown.length);
  const focused = document.activeElement.closest?.("#rows tr"), lines = [pad(top_(from))];
  const keep = new Map();
  for (let place = from; place < to; place++) {
    const line = row(place), i = shown[place];
    line.setAttribute("aria-rowindex", place + 2 + (opened >= 0 && place > opened ? 1 : 0));
    const button = line.firstChild.firstChild;
    button.setAttribute("aria-expanded", i === open);
    button.tabIndex = place === Math.min(Math.max(cursor, from), to - 1) ? 0 : -1;
    lines.push(line);
    keep.set(i, line);
    if (place === opened) lines.push(details(i, place + 3));
  }
  rows.clear();
  keep.forEach((line, i) => rows.set(i, line));
  lines.push(pad(Math.max(whole - top_(to), 0)));
  const active = document.activeElement, y = grid.scrollTop;
  $("rows").replaceChildren(...lines);
  grid.scrollTop = y;  // which changes while the row with the focus is away
  if (focused && document.contains(active)) active.focus({ preventScroll: true });
  $("table").setAttribute("aria-rowcount", shown.length + 1 + (opened >= 0 ? 1 : 0));
}
const across = () => [...$("heads").children].filter((cell) => cell.offsetWidth).length;  // a narrow screen hides some
function pad(height) {
  const line = make("tr", { className: "pad", ariaHidden: "true" }, make("td", { colSpan: across() }));
  line.firstChild.style.height = `${height}px`;
  return line;
}
function toggle(i) {
  cursor = shown.indexOf(i);
  open = open === i ? -1 : i;
  opened_ = null;
  draw();
  $("grid").querySelector("button[tabindex='0']").focus({ preventScroll: true });
}
function move(place) {
  cursor = Math.min(Math.max(place, 0), shown.length - 1);
  const grid = $("grid"), y = top_(cursor), room = grid.clientHeight - 36;
  if (y < grid.scrollTop) grid.scrollTop = y; else if (y + ROW > grid.scrollTop + room) grid.scrollTop = y + ROW - room;
  draw();
  $("rows").querySelector("button[tabindex='0']")?.focus({ preventScroll: true });
}
let opened_ = null;
function details(i, index) {
  if (opened_) return opened_;
  const facts = make("dl"), add = (name, value) => value !== "" && facts.append(make("dt", { textContent: name }), make("dd", {}, value));
  const code = (text) => make("code", { textContent: printable(text) }), value = (name) => columns[name][i] === null ? "–" : String(columns[name][i]);
  const address = `${table.files[table.parts[columns.part[i]].file]}#${columns.name[i]}`, [storage, more] = columns.more[i];
  const copy = make("button", { textContent: "Copy address", onclick: (event) => clip(quoted(address), event.target) });
  const full = make("div", { className: "full cmd" }, code(address), copy);
  add("tensor", `${columns.dtype[i]} ${shapeText(i)}, ${commas(columns.bytes[i])} bytes${storage === null ? "" : `, storage ${storage}`}${more ? `, ${more}` : ""}`);
  if (columns.tied[i]) add("tied to", code(columns.tied[i]));
  if (table.diff) add("change", changeText(i) + (columns.change[i]?.length > 2 ? `; largest |a−b| ${number(columns.change[i][3])}, cosine ${number(columns.change[i][4])}` : ""));
  if (columns.count[i] !== null) {
    for (const name of ["min", "max", "mean", "std", "norm"]) add(name, value(name));
    add("values", `${commas(columns.count[i])}: ${commas(columns.zeros[i])} zero, ${commas(columns.nans[i])} NaN, ${commas(columns.infs[i])} Inf`);
  } else add("values", "not read");
  const quantiles = columns.quantiles[i];
  if (quantiles && quantiles.length) add("quantiles", ["5", "25", "50", "75", "95"].map((q, k) => `${q}%: ${number(quantiles[k])}`).join(", "));
  const pictures = make("div", {}, histogram(i)), thumb = thumbnail(i);
  if (columns.hist[i]) pictures.append(make("p", { className: "soft", textContent: `${number(columns.min[i])} … ${number(columns.max[i])}` }));
  if (thumb) pictures.append(thumb, make("p", { className: "soft", textContent: `Means of ${columns.thumb[i][0]} × ${columns.thumb[i][1]} blocks; blue −${columns.thumb[i][2]}, orange +${columns.thumb[i][2]}.` }));
  opened_ = make("tr", { className: "more" }, make("td", { colSpan: across() }, make("div", { className: "details" }, full, facts, pictures)));
  opened_.setAttribute("aria-rowindex", index);
  return opened_;
}

// Copies and downloads.
async function clip(text, button) {
  let done = false;
  try { await navigator.clipboard.writeText(text); done = true; } catch {
    const area = make("textarea", { value: text, className: "skip" });
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.dataset.label ??= button.textContent;
  button.textContent = done ? "Copied" : "Could not copy";
  say(done ? "Copied." : "Could not copy.");
  setTimeout(() => { button.textContent = label; }, 1500);
}
function save(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
const COLUMNS = ["name", "file", "dtype", "shape", "bytes", "count", "min", "max", "mean", "std", "norm", "zeros", "nans", "infs"];
const record = (i) => COLUMNS.map((name) => name === "file" ? table.files[table.parts[columns.part[i]].file] : name === "shape" ? columns.shape[i]?.join("x") ?? "" : columns[name][i]);
function csv() {  // what a spreadsheet would take for a formula gets a quote before it; some divide cells at ;
  const cell = (v) => { const text = v === null ? "" : printable(String(v)), safe = typeof v === "string" && /^\s*[=+\-@＝＋－＠]/u.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text; return /[",;\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe; };
  return [COLUMNS, ...shown.map(record)].map((line) => line.map(cell).join(",")).join("\n") + "\n";
}
const json = () => JSON.stringify(shown.map((i) => Object.fromEntries(COLUMNS.map((name, k) => [name, name === "shape" ? columns.shape[i] : record(i)[k]]))), null, 1);
function picture(figure) {
  const from = [...figure.querySelectorAll("svg")].find((svg) => svg.getBoundingClientRect().width), copy = from.cloneNode(true);
  const sources = [from, ...from.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, k) => {
    if (node.tagName === "title") return;
    const style = getComputedStyle(sources[k]);
    for (const name of ["fill", "stroke", "stroke-width", "font-size", "font-family"]) node.setAttribute(name, style.getPropertyValue(name));
  });
  copy.setAttribute("xmlns", SVG);
  return new XMLSerializer().serializeToString(copy);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.copy !== undefined) clip(button.dataset.copy || button.parentNode.querySelector("code").textContent, button);
  else if (button.dataset.svg !== undefined) save(`${button.dataset.svg}.svg`, "image/svg+xml", picture(button.closest("figure")));
});
document.addEventListener("keydown", (event) => {
  const line = event.target.closest("#rows th button");
  if (line) {
    const here = shown.indexOf([...rows].find(([, tr]) => tr.contains(line))[0]), page = Math.floor($("grid").clientHeight / ROW) - 2;
    const to = { ArrowDown: here + 1, ArrowUp: here - 1, PageDown: here + page, PageUp: here - page, Home: 0, End: shown.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); move(to); }
  } else if (event.key === "/" && !/INPUT|SELECT/.test(event.target.tagName)) { event.preventDefault(); $("search")?.focus(); }
});
$("theme").onclick = () => {
  const root = document.documentElement, dark = getComputedStyle(document.body).backgroundColor.match(/\d+/)[0] < 128;
  root.dataset.theme = dark ? "light" : "dark";
  $("theme").setAttribute("aria-pressed", String(!dark));
  if (table) { rows.clear(); opened_ = null; draw(); }
};
(async () => {
  const packed = $("data");
  if (!packed) return;
  const bytes = Uint8Array.from(atob(packed.textContent.trim()), (c) => c.charCodeAt(0));
  table = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  columns = table.columns;
  const choices = [["all", "All parts"]];
  table.files.forEach((name, k) => { if (table.files.length > 1) choices.push([`file:${k}`, `${"AB"[k]} · ${printable(name)}`.slice(0, 60)]); });
  if (table.parts.length > table.files.length) table.parts.forEach((p, k) => choices.push([`part:${k}`, partName(p).slice(0, 60)]));
  $("part").replaceChildren(...choices.map(([value, text]) => make("option", { value, textContent: text })));
  $("part").hidden = choices.length < 2;
  $("part").value = table.files.length > 1 ? "file:0" : "all";
  let waiting = 0;
  $("search").oninput = find;
  $("part").onchange = find;
  $("grid").onscroll = () => { waiting ||= requestAnimationFrame(() => { waiting = 0; draw(); }); };
  addEventListener("resize", () => { opened_ = null; draw(); });
  $("csv").onclick = () => save("tensors.csv", "text/csv", csv());
  $("json").onclick = () => save("tensors.json", "application/json", json());
  $("copycsv").onclick = (event) => clip(csv(), event.target);
  $("tensors").hidden = false;
  $("grid").style.height = `${Math.min(Math.max(columns.name.length * ROW + 38, 390), 620)}px`;
  $("table").classList.toggle("diff", table.diff);
  head();
  find();
  document.documentElement.dataset.ready = performance.now();
})();
