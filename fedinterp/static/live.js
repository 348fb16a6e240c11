// The live view of a training run: it holds the numbers and patches the drawing. No library, no network.
// Texts become text nodes, never markup. Buttons send a word; everything else comes from the kernel.

const SVG = "http://www.w3.org/2000/svg"

function fill(node, attributes, children) {
  for (const [k, v] of Object.entries(attributes || {})) {
    if (v == null || v === false) continue
    if (k.startsWith("on")) node.addEventListener(k.slice(2), v)
    else if (k === "text") node.textContent = v
    else node.setAttribute(k, v === true ? "" : v)
  }
  for (const child of children.flat(Infinity)) if (child != null && child !== false) node.append(child)
  return node
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children)
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children)

const clamp = (v, low, high) => Math.min(Math.max(v, low), high)
const percent = v => Number.isFinite(v) ? `${Math.round(v * 100)} %` : "–"
const two = v => Number.isFinite(v) ? v.toFixed(2) : "–"
const size = bytes => bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`
const span = t => t < 90 ? `${Math.max(Math.round(t), 1)} s` : t < 5400 ? `${Math.round(t / 60)} min` : `${(t / 3600).toFixed(1)} h`

function ticks(high, most) { // round numbers from 0 to high, about `most` of them
  const raw = high / most, ten = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map(k => k * ten).find(k => k >= raw)
  return Array.from({length: Math.floor(high / step + 1e-9) + 1}, (_, i) => i * step)
}

let ruler = null
function width(text, px) {
  ruler = ruler || document.createElement("canvas").getContext("2d")
  ruler.font = `600 ${px}px system-ui, sans-serif`
  return ruler.measureText(text).width
}
function short(text, room, px) { // the text, cut where it does not fit
  const letters = [...text]
  if (width(text, px) <= room) return text
  while (letters.length > 1 && width(letters.join("") + "…", px) > room) letters.pop()
  return letters.join("") + "…"
}

const apart = name => name && `\u2068${name}\u2069` // a name written from right to left leaves the number behind it alone

// ---------------------------------------------------------------- one chart: made once, patched after

class Chart {
  constructor(title, format, names) { // names: of its lines, the quiet ones first
    this.title = title
    this.format = format
    this.lines = names.map(([name, look]) => ({name, look, line: s("path", {class: `fl-line fl-${look}`}), dots: s("path", {class: `fl-dots fl-${look}`}), label: s("text", {class: `fl-label fl-${look}`})}))
    this.axes = s("g", {class: "fl-axes", "aria-hidden": "true"})
    this.rule = s("line", {class: "fl-cursor", visibility: "hidden"})
    this.about = s("title", {})
    this.svg = s("svg", {role: "img"}, this.about, this.axes, this.rule, this.lines.map(l => [l.line, l.dots]), this.lines.map(l => l.label))
    this.node = h("figure", {class: "fl-chart"}, h("figcaption", {text: title}), this.svg)
  }
  draw(room, px, rounds, data, high) { // data: one list of [round, value] a line
    const says = l => `${apart(short(l.name, px * 6.5, px))} ${this.format(l.last)}`.trim()
    this.lines.forEach((l, i) => { l.last = data[i].length ? data[i][data[i].length - 1][1] : NaN })
    const widest = Math.max(...this.lines.map(l => width(says({...l, last: 1}), px))) + px // of all, so that the axis stays when the label changes
    const tall = px * 15.5, left = px * 3.2, right = Math.max(Math.ceil(widest / px) * px, px * 4.2), top = px * .6, bottom = px * 2.1
    const x = r => left + (room - left - right) * r / Math.max(rounds, 1), y = v => tall - bottom - (tall - top - bottom) * v / high
    Object.assign(this, {x, y, left, data})
    const scale = [room, right, px, rounds, high].join()
    if (scale !== this.scale) { // the axes change with the room and the largest value only
      this.scale = scale
      fill(this.svg, {width: room, height: tall}, [])
      fill(this.rule, {y1: top, y2: tall - bottom}, [])
      this.axes.replaceChildren(...ticks(high, 4).flatMap(v => [
        s("line", {class: "fl-grid", x1: left, x2: room - right, y1: y(v), y2: y(v)}),
        s("text", {x: left - px * .5, y: y(v), "text-anchor": "end", "dominant-baseline": "central", text: this.format(v)})]),
        ...ticks(rounds, 6).filter(Number.isInteger).map(r => s("text", {x: x(r), y: tall - px * .9, "text-anchor": "middle", text: r})),
        s("text", {x: room - right + px * .9, y: tall - px * .9, text: "round"}))
    }
    const many = rounds > 40
    const ends = this.lines.map((l, i) => {
      const points = data[i], last = points[points.length - 1]
      l.line.setAttribute("d", points.map(([r, v], k) => `${k ? "L" : "M"}${x(r).toFixed(1)} ${y(v).toFixed(1)}`).join(""))
      l.dots.setAttribute("d", l.look === "quiet" ? "" : (many ? points.slice(-1) : points).map(([r, v]) => `M${x(r).toFixed(1)} ${y(v).toFixed(1)}h0`).join(""))
      l.label.textContent = ""
      return last && l.look !== "quiet" ? {l, at: y(last[1]), x: x(last[0]), text: says(l)} : null
    }).filter(Boolean).sort((a, b) => a.at - b.at)
    const gap = px * 1.25
    ends.forEach((e, i) => { if (i) e.at = Math.max(e.at, ends[i - 1].at + gap) })
    for (let i = ends.length - 1, floor = tall - bottom; i >= 0; i--, floor -= gap) ends[i].at = Math.min(ends[i].at, floor)
    for (const e of ends) { e.l.label.textContent = e.text; fill(e.l.label, {x: e.x + px * .7, y: e.at, "dominant-baseline": "central"}, []) }
    this.about.textContent = `${this.title}, ${data[data.length - 1].length} rounds: ${ends.map(e => e.text).join(", ")}`
    this.svg.setAttribute("aria-label", this.about.textContent)
  }
}

// ---------------------------------------------------------------- the view

const WORDS = {running: "training", stopped: "stopped", finished: "finished", failed: "failed"}

class Live {
  constructor(model, el) {
    Object.assign(this, {model, el, off: [], chosen: null, asked: 0, heard: 0, pressed: false, told: 0})
    this.about = model.get("about")
    this.build()
    for (const key of ["now", "history"]) this.on(`change:${key}`, () => { this.hear(); this.later() }) // only the kernel changes them
    this.on("msg:custom", message => { if (message && message.alive) this.hear() })
    const watch = new MutationObserver(() => this.theme())
    watch.observe(document.body, {attributes: true})
    const system = matchMedia("(prefers-color-scheme: dark)"), change = () => this.theme()
    system.addEventListener("change", change)
    let last = 0
    const resize = new ResizeObserver(() => { if (Math.abs(this.root.clientWidth - last) > 2) { last = this.root.clientWidth; this.later() } if (!this.asked) this.beat() })
    resize.observe(this.root) // tells as well that the page has the view now, which may be after render
    this.off.push(() => watch.disconnect(), () => system.removeEventListener("change", change), () => resize.disconnect())
    if (model.send) { const timer = setInterval(() => this.beat(), 4000); this.off.push(() => clearInterval(timer)) }
    this.theme()
    this.badge()
  }
  on(event, f) { this.model.on(event, f); this.off.push(() => this.model.off(event, f)) }
  close() { this.off.forEach(f => f()); cancelAnimationFrame(this.frame); this.root.remove() }
  later() { // one drawing a frame, however many changes
    if (this.frame) return
    this.frame = requestAnimationFrame(() => { this.frame = null; this.draw() })
  }

  build() {
    const {classes} = this.about, button = (word, text, title) => h("button", {type: "button", "data-do": word, title, text, onclick: () => this.ask(word)})
    this.word = h("span", {class: "fl-word"})
    this.badgeNode = h("span", {class: "fl-badge", title: "live: the kernel answers; busy: another cell is running; recorded: everything shown is in this page"})
    this.buttons = {stop: button("stop", "■ Stop", "Stop now; every finished round is kept"), "go on": button("go on", "▶ Go on", "Go on from the last finished round"),
      explorer: button("explorer", "Open explorer", "Look into the run as far as it is")}
    this.bar = h("div", {class: "fl-bar", role: "progressbar", "aria-label": "training", "aria-valuemin": 0, "aria-valuemax": 100}, h("i"))
    this.says = h("p", {class: "fl-says"})
    this.error = h("p", {class: "fl-error", role: "alert", hidden: true})
    this.live = h("p", {class: "fl-live", "aria-live": "polite"})
    this.accuracy = new Chart("Accuracy of the server on the test set", percent, [...classes.map(c => [c, "quiet"]), ["", "chosen"], ["all", "main"]])
    this.loss = new Chart("Loss", two, [["", "main"]])
    this.list = h("ul", {class: "fl-classes", "aria-label": "classes"}, classes.map((c, i) => h("li", {},
      h("button", {type: "button", "data-cls": c, "aria-pressed": "false", title: `Show ${c} in the chart`, onclick: () => { this.chosen = this.chosen === i ? null : i; this.later() }},
        h("span", {text: c}), h("span", {class: "fl-track", "aria-hidden": "true"}, h("i")), h("b", {text: "–"})))))
    this.tableButton = h("button", {type: "button", "data-do": "table", "aria-expanded": "false", text: "table", title: "Show as table", onclick: () => this.toggle()})
    this.rows = h("div", {class: "fl-rows", hidden: true, tabindex: 0})
    this.note = h("p", {class: "fl-note"})
    this.tip = h("div", {class: "fl-tip", role: "tooltip", hidden: true})
    this.root = h("section", {class: "fl", "data-lm-suppress-shortcuts": "true", "aria-label": `training of ${this.about.id}`},
      h("header", {}, h("h3", {}, this.about.title, " ", h("small", {text: this.about.detail})), h("span", {class: "fl-right"}, Object.values(this.buttons), this.word, this.badgeNode)),
      this.bar, this.says, this.error,
      h("div", {class: "fl-grid3"}, this.accuracy.node, h("figure", {class: "fl-chart"}, h("figcaption", {text: "By class, now"}), this.list), this.loss.node),
      h("footer", {}, this.note, this.tableButton), this.rows, this.live, this.tip)
    this.root.addEventListener("keydown", e => e.stopPropagation())
    for (const chart of [this.accuracy, this.loss]) {
      chart.svg.addEventListener("pointermove", e => this.hover(chart, e))
      chart.svg.addEventListener("pointerleave", () => { this.tip.hidden = true; this.point(null) })
    }
    this.el.append(this.root)
  }

  theme() {
    const lab = document.body.dataset.jpThemeLight
    const dark = lab === "false" || (lab === undefined && matchMedia("(prefers-color-scheme: dark)").matches)
    this.root.dataset.theme = dark ? "dark" : "light"
    this.later()
  }

  ask(word) { // the kernel hears a word, and does what it means
    if (this.pressed) return
    if (word === "stop") { this.pressed = true; this.say("stopping") }
    this.model.send({do: word})
    this.later()
  }
  hear() { this.heard = Date.now(); this.badge() }
  beat() { if (document.hidden || !this.root.isConnected || !this.model.send) return; this.asked = Date.now(); try { this.model.send({alive: "?"}) } catch { this.heard = 0 } ; setTimeout(() => this.badge(), 1500) }
  badge() { // live: the kernel answers; busy: it did a moment ago; recorded: nobody is there, and what is shown stays
    const quiet = Date.now() - this.heard
    const word = !this.model.send || !this.heard || quiet > 30000 ? "recorded" : this.asked - this.heard > 1200 ? "busy" : "live"
    if (this.badgeNode.dataset.word === word) return
    this.badgeNode.textContent = this.badgeNode.dataset.word = word
    this.later()
  }
  say(text) { if (text !== this.said) this.live.textContent = this.said = text }

  // -------------------------------------------------------------- the numbers

  read() { // one row a round: round, loss, accuracy, accuracy of each class
    const view = this.model.get("history"), many = 3 + this.about.classes.length
    const flat = view && view.byteLength ? new Float64Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength)) : []
    return Array.from({length: flat.length / many}, (_, i) => flat.slice(i * many, (i + 1) * many))
  }
  column(k) { return this.held.filter(row => Number.isFinite(row[k])).map(row => [row[0], row[k]]) }

  // -------------------------------------------------------------- drawing

  draw() {
    if (!this.root.isConnected || !this.root.clientWidth) return
    const now = this.model.get("now"), {classes, rounds} = this.about, px = parseFloat(getComputedStyle(this.root).fontSize)
    this.held = this.read()
    const last = this.held.filter(row => Number.isFinite(row[2])).pop(), values = classes.map((_, i) => last ? last[3 + i] : NaN)
    const known = values.filter(Number.isFinite), lowest = known.length > 1 ? values.indexOf(Math.min(...known)) : -1
    const shown = this.chosen ?? lowest, chosen = this.accuracy.lines[classes.length]
    chosen.name = shown < 0 ? "" : classes[shown]
    const rooms = [this.accuracy.node.clientWidth, this.loss.node.clientWidth] // both are read before any is changed
    this.accuracy.draw(rooms[0], px, rounds, [...classes.map((_, i) => this.column(3 + i)), shown < 0 ? [] : this.column(3 + shown), this.column(2)], 1)
    const losses = this.column(1)
    this.loss.draw(rooms[1], px, rounds, [losses], Math.max(...losses.map(p => p[1]), .1) * 1.05)
    for (const [i, item] of [...this.list.children].entries()) {
      const [node] = item.children, [, track, value] = node.children
      node.setAttribute("aria-pressed", String(this.chosen === i))
      node.dataset.on = String(shown === i)
      track.firstChild.style.width = `${(values[i] || 0) * 100}%`
      value.textContent = percent(values[i])
    }
    this.status(now, rounds, last)
    if (!this.rows.hidden) this.table()
    this.root.dataset.rounds = this.held.length
  }

  status(now, rounds, last) {
    const {state} = now, here = this.badgeNode.dataset.word !== "recorded", busy = state === "running"
    if (!busy) this.pressed = false
    const whole = rounds * now.of || 1, share = state === "finished" ? 1 : clamp(((now.round - (busy && now.done < now.of && now.round ? 1 : 0)) * now.of + (busy && now.done < now.of ? now.done : 0)) / whole, 0, 1)
    this.root.dataset.state = state
    this.word.textContent = busy && this.pressed ? "stopping …" : WORDS[state]
    this.word.dataset.word = state
    this.bar.firstChild.style.width = `${share * 100}%`
    this.bar.setAttribute("aria-valuenow", Math.round(share * 100))
    const left = now.left == null ? "" : `, about ${span(now.left)} left`, at = `round ${now.round} of ${rounds}`
    const text = state === "finished" ? `All ${rounds} rounds are done.` : busy && !here ? `Recorded while it was training, at ${at}.`
      : busy ? (now.round ? `Round ${now.round} of ${rounds}, client ${now.done} of ${now.of}${left}.` : "Round 0: the untrained server is set up and measured.")
      : now.kept < 0 ? `${state === "stopped" ? "Stopped" : "Ended"} before the first round was done.` : `${state === "stopped" ? "Stopped" : "Ended"} after ${at}; what is done is kept.`
    this.says.textContent = text
    this.error.textContent = now.error || ""
    this.error.hidden = !now.error
    const focus = this.root.contains(document.activeElement) ? document.activeElement.dataset.do : null
    this.buttons.stop.hidden = !here || !busy
    this.buttons.stop.setAttribute("aria-disabled", String(this.pressed)) // not disabled, which would take the focus away
    this.buttons["go on"].hidden = !here || busy || state === "finished"
    this.buttons.explorer.hidden = !here || busy || now.kept < 0
    this.buttons.explorer.textContent = now.open ? "Close explorer" : "Open explorer"
    this.buttons.explorer.setAttribute("aria-expanded", String(!!now.open))
    if (focus === "stop" && !busy) this.buttons["go on"].focus() // the button under the finger is gone: its counterpart takes over
    if (focus === "go on" && busy) this.buttons.stop.focus()
    const keeps = now.disk ? ` The trace (${this.about.trace}) takes ${size(now.disk)} when all rounds are done.` : ""
    this.note.textContent = `Blue: all test images; orange: ${this.chosen == null ? "the class that is lowest now" : "the chosen class"}; grey: the other classes. Kept in ${this.about.path}.${keeps}`
    const news = last ? `round ${last[0]} of ${rounds}: accuracy ${percent(last[2])}` : ""
    if (!this.pressed && (state !== this.spoken || Date.now() - this.told > 10000)) { // states at once, rounds now and then
      this.spoken = state
      this.told = Date.now()
      this.say(`${WORDS[state]}${news ? "; " + news : ""}${now.error ? "; " + now.error : ""}`)
    }
  }

  toggle() {
    this.rows.hidden = !this.rows.hidden
    this.tableButton.setAttribute("aria-expanded", String(!this.rows.hidden))
    this.draw()
  }
  table() {
    const cell = (tag, text) => h(tag, {text, scope: tag === "th" ? "col" : null})
    const body = this.held.map(row => h("tr", {}, cell("td", row[0]), cell("td", two(row[1])), [...row.slice(2)].map(v => cell("td", percent(v))))).reverse()
    this.rows.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, ["round", "loss", "accuracy", ...this.about.classes].map(t => cell("th", t)))), h("tbody", {}, body)))
  }

  // -------------------------------------------------------------- pointer

  point(r) {
    for (const chart of [this.accuracy, this.loss]) {
      chart.rule.setAttribute("visibility", r == null ? "hidden" : "visible")
      if (r != null) fill(chart.rule, {x1: chart.x(r), x2: chart.x(r)}, [])
    }
  }
  hover(chart, e) {
    if (!this.held || !this.held.length) return
    const box = this.root.getBoundingClientRect(), at = e.clientX - chart.svg.getBoundingClientRect().left
    const row = this.held.reduce((a, b) => Math.abs(chart.x(b[0]) - at) < Math.abs(chart.x(a[0]) - at) ? b : a), name = this.accuracy.lines[this.about.classes.length].name
    this.point(row[0])
    this.tip.textContent = `round ${row[0]}: accuracy ${percent(row[2])}` + (name ? `, ${apart(name)} ${percent(row[3 + this.about.classes.indexOf(name)])}` : "") + `, loss ${two(row[1])}`
    this.tip.hidden = false
    this.tip.style.left = `${clamp(e.clientX - box.left + 14, 0, Math.max(box.width - this.tip.offsetWidth - 4, 0))}px`
    this.tip.style.top = `${e.clientY - box.top + 18}px`
  }
}

function render({model, el}) {
  const view = new Live(model, el)
  return () => view.close()
}
export default {render}
