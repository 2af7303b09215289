"""The page of `report` in a real Chromium: search, sort, theme, details, copies, keyboard, paper, hostile names."""

from __future__ import annotations

import json
import random
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.checkpoint.paths import matcher
from ckptool.errors import printable
from tests.support.browser import Browser
from tests.support.small_runs import config

HOSTILE = ("<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "{{7*7}}", "\u202eabc\u202c", "=1+1")
HOSTILE += (
    "\x1b[31mred",
    "x" * 10_000,
    "__proto__",
    "constructor",
    "a\nb",
    "l.*",
    "[x]",
    "it's",
    "שלום.weight",
    "😀.w",
)


def _blocks(layers: int, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    made = nn.ModuleDict({"embed": nn.Embedding(50, 16), "layers": nn.TransformerEncoder(block, layers)})
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.state_dict()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 320 tensors or so: weights with NaN in one, an optimizer."""
    folder = tmp_path_factory.mktemp("page")
    state = _blocks(9)
    state["layers.layers.3.norm1.weight"][0] = float("nan")
    optimizer = {"state": {i: {"exp_avg": torch.randn(4, 4), "step": torch.tensor(3.0)} for i in range(105)}}
    optimizer["param_groups"] = [{"params": list(range(105)), "lr": 0.1}]  # type: ignore[assignment]
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}, "optimizer": optimizer}, folder / "m.pt")
    ckptool.report(folder / "m.pt", out=folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    torch.save({name: torch.ones(2, 2) for name in HOSTILE}, folder / "<b>.pt")
    ckptool.report(folder / "<b>.pt", out=folder / "page.html")
    return folder / "page.html"


def _addresses(path: Path, pages: Path) -> list[str]:
    return [row.address for row in ckptool.inspect(path).tensors]


def _matches(query: str, names: list[tuple[str, str]]) -> list[str]:
    """What a search finds, by Python's matcher: names inside their part, and whole addresses."""
    if query.startswith("re:"):
        words = [matcher(query)]
    else:
        words = [
            matcher(word) if set(word) & set("*?[") else lambda name, word=word: word in name  # type: ignore[misc]
            for word in query.split()
        ]
    return [full for short, full in names if all(word(short) or word(full) for word in words)]


def test_search_is_the_matcher_of_the_command_line(browser: Browser, page: Path) -> None:
    browser.open(page)
    full = _addresses(page.with_name("m.pt"), page)
    names = [(name.partition("/")[2], name) for name in full]
    shown = dict(zip(full, browser.names(), strict=True))
    queries = ["", "norm weight", "*.bias", "layers.*.norm?.weight", "state_dict/*", "re:norm[12]", "re:^state/\\d+/s"]
    queries += _globs([short for short, _ in names], 40)
    slowest = 0.0
    for query in queries:
        wanted = [shown[name] for name in _matches(query, names)]
        assert browser.search(query) == wanted, query
        slowest = max(slowest, float(browser.js("return document.getElementById('grid').dataset.ms")))
    assert f"{len(full)} tensors" in browser.js("return document.getElementById('status').textContent")
    assert slowest < 100


def test_every_glob_matches_as_python_does(browser: Browser, hostile: Path) -> None:
    """Names and patterns from one small alphabet: brackets, ranges, negations, what is special in expressions."""
    browser.open(hostile)
    draw = random.Random(1)
    letters = "ab-]![^\\*?.c\nשé😀/{}()|+$&~#"
    names = ["".join(draw.choices(letters, k=draw.randint(1, 4))) for _ in range(300)]
    patterns = ["".join(draw.choices("ab-]![^\\*?.[[]]--!!", k=draw.randint(1, 7))) for _ in range(3_000)]
    patterns = [each for each in patterns if set(each) & set("*?[")]
    found = browser.js(
        "const [patterns, names] = arguments; return patterns.map((p) => { const g = glob(p);"
        " return names.map((n) => g.test(n) ? '1' : '0').join(''); })",
        patterns,
        names,
    )
    for pattern, answers in zip(patterns, found, strict=True):
        matches = matcher(pattern)
        assert answers == "".join("1" if matches(name) else "0" for name in names), pattern


def _globs(names: list[str], count: int) -> list[str]:
    draw, made = random.Random(0), []
    for _ in range(count):
        name = list(draw.choice(names))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(name))
            name[at : at + draw.randint(0, 6)] = [draw.choice(["*", "?", "[a-m]", "[!0-4]", "[", "*.*"])]
            name = name or ["*"]
        made.append("".join(name))
    return made


@pytest.mark.parametrize("column", ["name", "dtype", "shape", "bytes", "min", "max", "mean", "std", "norm", "zeros"])
def test_a_column_sorts_both_ways_and_says_so(browser: Browser, page: Path, column: str) -> None:
    browser.open(page, width=1500)
    before = browser.names()
    places, states = {}, []
    for _ in range(3):
        browser.js("document.querySelector(`#heads .f-${arguments[0]} button`).click()", column)
        states.append(browser.js("return document.querySelector(`#heads .f-${arguments[0]}`).ariaSort", column))
        places[states[-1]] = browser.js(
            "const f = FIELDS.find(([n]) => n === arguments[0]); return shown.map((i) => f[4](i))", column
        )
        said = browser.js("return document.getElementById('status').textContent")
        assert (f"sorted by {column}, {states[-1]}" in said) is (states[-1] is not None)
    assert set(states) == {"ascending", "descending", None} and browser.names() == before
    for direction, sign in (("ascending", 1), ("descending", -1)):
        values = [value for value in places[direction] if value is not None]
        keys: list[Any] = [_natural(v) if isinstance(v, str) else v for v in values]
        assert keys == sorted(keys, reverse=sign < 0)
        assert places[direction][len(values) :] == [None] * (len(places[direction]) - len(values))


def _natural(text: str) -> list[Any]:
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", text)]


def test_the_theme_follows_the_system_and_the_button(browser: Browser, page: Path) -> None:
    def light() -> bool:
        return bool(browser.js("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 128"))

    for dark in (False, True):
        browser.open(page, dark=dark)
        assert light() is not dark
        browser.js("document.getElementById('theme').click()")
        assert light() is dark
        browser.js("document.getElementById('theme').click()")
        assert light() is not dark


def test_a_module_filters_the_table_to_its_tensors(browser: Browser, page: Path) -> None:
    browser.open(page)
    full = _addresses(page.with_name("m.pt"), page)
    cells = browser.js(
        "return [...document.querySelectorAll('svg.wide g[role=button]')].map((g) => [g.dataset.glob,"
        " g.querySelector('title').textContent])"
    )
    assert len(cells) > 20
    for glob, title in cells:
        browser.js("document.querySelector(`svg.wide g[data-glob='${arguments[0]}']`).focus()", glob)
        browser.keys("\ue007")
        count = len(browser.names())
        assert f": {count} tensor" in title and count == sum(matcher(glob)(name) for name in full)
        assert browser.js("return document.activeElement.getAttribute('aria-pressed')") == "true"
    browser.keys(" ")
    assert len(browser.names()) == len(full)


def test_a_row_opens_to_the_numbers_of_json(browser: Browser, page: Path) -> None:
    browser.open(page)
    facts = ckptool.inspect(page.with_name("m.pt"), stats=True).to_dict()["tensors"]
    for number in (0, 5, 40, 104, 150, len(facts) - 1):
        browser.js("toggle(shown[arguments[0]]); move(arguments[0]); draw()", number)
        shown = browser.js(
            "const d = document.querySelector('.details dl'), all = {}; let key;"
            "for (const n of d.children) if (n.tagName === 'DT') key = n.textContent; else all[key] = n.textContent;"
            "return all"
        )
        numbers = facts[number]["statistics"]
        for name in ("min", "max", "mean", "std", "norm"):
            wanted = numbers[name]
            assert shown[name] == "–" if wanted is None else float(shown[name]) == wanted
        counts = f"{numbers['count']:,}: {numbers['zeros']:,} zero, {numbers['nans']:,} NaN, {numbers['infs']:,} Inf"
        assert shown["values"] == counts
        assert facts[number]["dtype"] in shown["tensor"] and f"{facts[number]['nbytes']:,} bytes" in shown["tensor"]
        browser.js("toggle(open)")


def test_downloads_are_the_rows_that_are_shown(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.search("norm1")
    browser.js("document.getElementById('json').click()")
    got = json.loads(browser.downloaded("tensors.json"))
    facts = {
        "/".join(map(str, fact["path"])): fact
        for fact in ckptool.inspect(page.with_name("m.pt"), stats=True).to_dict()["tensors"]
    }
    assert got and [row["name"] for row in got] == [name for name in facts if "norm1" in name]
    for row in got:
        fact = facts[row["name"]]
        assert row["shape"] == fact["shape"] and row["dtype"] == fact["dtype"]
        assert all(row[name] == fact["statistics"][name] for name in ("min", "max", "mean", "std", "norm", "nans"))
    browser.js("document.getElementById('csv').click()")
    lines = browser.downloaded("tensors.csv").splitlines()
    assert len(lines) == len(got) + 1 and lines[0].startswith("name,file,dtype")
    browser.js("document.querySelector('[data-svg=modules]').click()")
    picture = browser.downloaded("modules.svg")
    assert picture.startswith("<svg") and 'fill="rgb(' in picture and "<title>" in picture


def test_commands_and_addresses_are_copied_and_run(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    commands = browser.js("return [...document.querySelectorAll('.cmd code')].map((c) => c.textContent)")
    buttons = browser.driver.find_elements("css selector", ".cmd button[data-copy]")
    assert commands and len(commands) == len(buttons)
    for command, button in zip(commands, buttons, strict=True):
        button.click()
        assert browser.wait("return navigator.clipboard.readText()") == command
        browser.wait("return arguments[0].textContent === 'Copied'", button)
        _runs(command, page.parent)
    browser.js("toggle(shown[7])")
    browser.js("document.querySelector('.details button').click()")
    address = browser.wait("return navigator.clipboard.readText().then((t) => t.includes('#') && t)")
    _runs(f"ckptool show {address}", page.parent)


def test_hostile_addresses_are_quoted_for_a_shell(browser: Browser, hostile: Path) -> None:
    browser.open(hostile)
    words = browser.js("return columns.name.map((n) => [n, quoted(n)])")
    for name, word in words:
        got = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True, timeout=20)
        assert got.stdout == name.encode("utf-8", "surrogatepass")


def _runs(command: str, folder: Path) -> None:
    """Exit 1 is an answer, too."""
    import sys

    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(command, shell=True, cwd=folder, env={"PATH": path}, capture_output=True, timeout=60)
    assert done.returncode in (0, 1) and b"Traceback" not in done.stderr, (command, done.stderr)


def test_hostile_names_are_text(browser: Browser, hostile: Path) -> None:
    browser.open(hostile)
    shown = browser.names()
    assert shown == [
        name if len(name) <= 300 else f"…{name[-299:]}"
        for row in ckptool.inspect(hostile.with_name("<b>.pt")).tensors
        for name in [printable(row.address)]
    ]
    for number in range(len(shown)):
        browser.js("toggle(shown[arguments[0]])", number)
        assert printable(HOSTILE[number]).replace("~", "~0") in browser.js(
            "return document.querySelector('.details code').textContent"
        ).replace("~1", "/").replace("~", "~0")
        browser.js("toggle(open)")
    tags = browser.js("return [...document.querySelectorAll('img, b, iframe, object')].length")
    scripts = browser.js("return document.scripts.length")
    text = browser.js("return document.body.textContent")
    assert tags == 0 and scripts == 2 and "{{7*7}}" in text
    assert not any(c in browser.js("return document.body.innerText") for c in "\u202e\u202c\x1b")
    assert browser.js("return document.documentElement.scrollWidth <= innerWidth")


def test_nothing_is_asked_for(browser: Browser, page: Path) -> None:
    """Served over HTTP, everything is opened and nothing but the page asked for."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page.read_bytes())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        browser.open(f"http://127.0.0.1:{server.server_port}/page")
        browser.js("toggle(shown[0]); document.getElementById('theme').click(); order('norm')")
        refused = browser.js("const done = arguments[0]; return fetch('/other').then(() => 'fetched', () => 'refused')")
        entries = browser.js("return performance.getEntriesByType('resource').map((e) => e.name)")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert refused == "refused" and entries == []
    assert [path for path in seen if path != "/page"] == []
    assert all("Content Security Policy" in complaint for complaint in browser.complaints())


def test_everything_is_reached_by_keyboard(browser: Browser, page: Path) -> None:
    """Tab alone reaches every control that a mouse can use, with a visible focus; a row opens and closes by Enter."""
    browser.open(page)
    reached, seen = [], set()
    for _ in range(80):
        browser.keys("\ue004")
        what = browser.js(
            "const e = document.activeElement, s = getComputedStyle(e); e.dataset.reached = 1;"
            "return [e.id || e.textContent.slice(0, 30), s.outlineStyle !== 'none' || e.tagName === 'g', e.tagName]"
        )
        if what[2] == "BODY":
            break
        reached.append(what)
        seen.add(what[0])
    assert all(outlined for _, outlined, _ in reached), reached
    assert {"search", "theme", "csv", "json", "copycsv", "part"} <= seen and "Skip to the report" in seen
    left = browser.js(
        "return [...document.querySelectorAll('button:not([disabled]), input, select, summary')].filter((e) =>"
        " e.offsetParent && !e.dataset.reached && !e.closest('#rows')).map((e) => e.outerHTML)"
    )
    assert left == []
    browser.js("document.querySelector('#rows th button[tabindex=\"0\"]').focus()")
    browser.keys("\ue015", "\ue015", "\ue007")  # down, down, Enter
    assert browser.js("return [open, document.activeElement.getAttribute('aria-expanded')]") == [2, "true"]
    browser.keys("\ue007", "\ue010")  # Enter, End
    assert browser.js("return [open, shown.length - 1 - cursor]") == [-1, 0]
    assert browser.js("return document.activeElement.closest('#rows') !== null")


CONTRAST = """
const lum = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const rgb = (s) => s.match(/[\\d.]+/g).map(Number);
const back = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > .99) return c.slice(0, 3); } return [255, 255, 255]; };
const bad = [];
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.getClientRects().length || e.closest('script, title, option') || e.disabled) continue;
  const style = getComputedStyle(e), svg = e.tagName === 'text';
  const fore = rgb(svg ? style.fill : style.color), box = svg && e.parentNode.querySelector('rect');
  const behind = box ? rgb(getComputedStyle(box).fill) : back(e.closest('svg') || e);
  const [a, b] = [lum(fore), lum(behind)].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
  if (ratio < 4.5) bad.push([e.tagName, e.className.baseVal ?? e.className, e.textContent.slice(0, 40), ratio]);
}
return bad;
"""

NAMELESS = """
const bad = [], name = (e) => e.getAttribute('aria-label') || e.textContent.trim() || e.title;
for (const e of document.querySelectorAll('button, input, select, summary, [role=button], [role=img], [role=region]'))
  if (!name(e)) bad.push(e.outerHTML.slice(0, 200));
for (const e of document.querySelectorAll('svg'))
  if (!e.getAttribute('role') && e.getAttribute('aria-hidden') !== 'true') bad.push(e.outerHTML.slice(0, 100));
const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
if (new Set(ids).size !== ids.length) bad.push('an id twice');
if (document.querySelectorAll('h1').length !== 1) bad.push('not one h1');
if (!document.documentElement.lang || !document.title) bad.push('no language or title');
for (const e of document.querySelectorAll('table')) if (!e.querySelector('th')) bad.push('table without headers');
let before = 1;
for (const e of document.querySelectorAll('h1, h2, h3')) {
  if (+e.tagName[1] > before + 1) bad.push('heading skipped');
  before = +e.tagName[1];
}
for (const e of document.querySelectorAll('[aria-sort]')) if (e.tagName !== 'TH') bad.push('aria-sort');
return bad;
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1500])
def test_contrast_and_labels(browser: Browser, page: Path, dark: bool, width: int) -> None:
    browser.open(page, width=width, dark=dark)
    browser.js("for (const d of document.querySelectorAll('details')) d.open = true; toggle(shown[0])")
    assert browser.js(CONTRAST) == []
    assert browser.js(NAMELESS) == []
    assert browser.js("return document.documentElement.scrollWidth <= innerWidth")


def test_the_table_is_a_table(browser: Browser, page: Path) -> None:
    browser.open(page)
    total = len(_addresses(page.with_name("m.pt"), page))
    assert browser.js("return document.getElementById('table').ariaRowCount") == str(total + 1)
    rows = browser.js("return [...document.querySelectorAll('#rows tr[aria-rowindex]')].map((r) => r.ariaRowIndex)")
    assert rows == [str(i + 2) for i in range(len(rows))] and len(rows) < 60
    browser.js("document.getElementById('grid').scrollTop = 1e6")
    browser.wait(f"return document.querySelector('#rows tr[aria-rowindex=\"{total + 1}\"]') !== null")
    assert browser.js("return document.querySelectorAll('#rows tr').length") < 60


def test_on_paper_it_is_two_or_three_pages(browser: Browser, page: Path) -> None:
    browser.open(page)
    pages = len(re.findall(rb"/Type\s*/Page\b(?!s)", browser.pdf()))
    assert 1 <= pages <= 3


def test_what_changed_is_told(browser: Browser, tmp_path: Path) -> None:
    a = dict(_blocks(4))
    b = {name: value.clone() for name, value in a.items()}
    b["layers.layers.2.norm1.weight"][:4] += 1
    b["new"] = torch.ones(3)
    del b["layers.layers.0.norm2.bias"]
    torch.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    ckptool.report(tmp_path / "a.pt", tmp_path / "b.pt", out=tmp_path / "page.html")
    browser.open(tmp_path / "page.html", width=1500)
    text = browser.js("return document.getElementById('main').innerText")
    first = text.split("The files")[0]
    assert "Values changed in layers.layers.2.norm1.weight: 4 of 16 elements, by up to 1;" in first
    assert (
        "only in A: layers.layers.0.norm2.bias; only in B: new." in first and "47 of 48 tensors are the same" in first
    )
    titles = browser.js("return [...document.querySelectorAll('svg.h title')].map((t) => t.textContent)")
    moved = [title for title in titles if ": 0.0%" not in title]
    assert moved == ["layers.layers.2 norm1.weight: 25.0% of its elements moved"]
    browser.js("order('change')")
    assert browser.names()[0] == "layers.layers.0.norm2.bias"
    words = browser.js("return shown.slice(0, 3).map(changeText)")
    assert words == ["only here", "values: 4 of 16", "same: bytes"]


def test_ten_thousand_tensors(browser: Browser, tmp_path: Path) -> None:
    """The page has under 3 MB, is there in a second, and is searched in a tenth of one."""
    state = {
        f"model.layers.{i // 100}.mlp.experts.{i % 100}.{name}.weight": torch.randn(4, 4)
        for i in range(3_334)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    torch.save(state, tmp_path / "m.pt")
    found = ckptool.report(tmp_path / "m.pt", out=tmp_path / "page.html")
    readies, took = [], []
    for _ in range(3):  # the quickest: other tests run beside this one
        browser.open(tmp_path / "page.html")
        readies.append(float(browser.js("return document.documentElement.dataset.ready")))
    ready = min(readies)
    for query in ("experts.7", "*.down_proj.weight", "layers 3 gate", "re:experts\\.\\d1\\."):
        browser.js("const s = document.getElementById('search'); s.value = arguments[0]; find()", query)
        took.append(float(browser.js("return document.getElementById('grid').dataset.ms")))
    print(f"{found.bytes:,} bytes, ready after {ready:.0f} ms, searched in {max(took):.0f} ms")
    assert found.bytes < 3_000_000 and ready < 1_000 and max(took) < 100


def test_findings_stand_beside_their_rules(browser: Browser, page: Path) -> None:
    browser.open(page)
    found = ckptool.report(page.with_name("m.pt")).files[0].health
    rows = browser.js(
        "return [...document.querySelectorAll('h2')].find((h) => h.textContent === 'Values').parentNode"
        ".querySelectorAll('tr').length"
    )
    text = browser.js("return document.body.textContent")
    assert rows == len(found.findings) + 1 and all(rule in text for rule in found.rules)
    assert found.findings and all(place in text for finding in found.findings for place in finding.details)
    assert browser.js("return document.querySelectorAll('td.warn').length") == len(found.findings)


def test_a_run_is_drawn_with_its_saves(browser: Browser, tmp_path: Path, harness: None) -> None:
    ckptool.train(config("eval.metric=val_acc", "eval.mode=max", run=tmp_path / "run").dumped())
    found = ckptool.report(tmp_path / "run", out=tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    titles = browser.js("return [...document.querySelectorAll('.charts svg')].map((s) => s.ariaLabel.split(':')[0])")
    assert set(titles) <= set(found.history.curves) and "loss" in titles
    marks = browser.js("return document.querySelector('.charts').querySelector('svg').querySelectorAll('.save').length")
    assert marks == len(found.history.saves) > 0
    rows = browser.js("return [...document.querySelectorAll('h2 ~ details tbody tr, h2 ~ details tr code')].length")
    assert found.norms is not None and rows >= len(found.norms.norms) > 0
    assert browser.js(NAMELESS) == []
