// The explorer's view: reads a trace once, then chooses and draws here. No library, no network, no kernel.
// Texts from the trace become text nodes, never markup.

// ---------------------------------------------------------------- the trace

const ARRAYS = {u1: Uint8Array, u2: Uint16Array, i2: Int16Array, i4: Int32Array, i8: BigInt64Array, f8: Float64Array}

async function readTrace(view) { // view: DataView over the bytes that Trace.pack made
  const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength)
  const inflated = new Blob([bytes.subarray(4)]).stream().pipeThrough(new DecompressionStream("deflate"))
  const raw = await new Response(inflated).arrayBuffer()
  const size = new DataView(raw).getUint32(0, true)
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(raw, 8, size)))
  const read = (about, n) => new ARRAYS[about.dtype](raw, 8 + size + about.at, n)
  const tables = {}
  for (const [name, t] of Object.entries(head.tables)) tables[name] = new Table(name, t, read)
  const p = head.pictures
  return {meta: head.meta, tables, pictures: p && {shape: p.shape, data: read(p, p.shape.reduce((a, b) => a * b, 1))}}
}

class Table {
  constructor(name, about, read) {
    this.name = name
    this.rows = about.rows
    this.columns = Object.keys(about.columns)
    this.of = {}
    for (const [c, a] of Object.entries(about.columns)) this.of[c] = {kind: a.kind, words: a.words, data: read(a, about.rows)}
    this.indexes = new Map()
  }
  at(i, column) { // what a cell holds; undefined where the table has no such column
    const c = this.of[column]
    if (!c) return undefined
    const v = c.data[i]
    return c.kind === "text" ? c.words[v] : c.kind === "bool" ? v === 1 : Number(v)
  }
  has(column) { return column in this.of }
  values(column) { // each value once; numbers in order
    const c = this.of[column]
    if (!c) return []
    return c.words || (c.distinct ||= [...new Set(c.data)].map(Number).sort((a, b) => a - b))
  }
  index(columns) { // rows by the values of some columns, made once
    const name = columns.join()
    if (!this.indexes.has(name)) {
      const found = new Map(), parts = columns.map(c => this.of[c])
      for (let i = 0; i < this.rows; i++) {
        let key = ""
        for (const p of parts) key += (p.kind === "text" ? p.words[p.data[i]] : String(p.data[i])) + "\u0000"
        found.has(key) ? found.get(key).push(i) : found.set(key, [i])
      }
      this.indexes.set(name, found)
    }
    return this.indexes.get(name)
  }
  select(where) { // row numbers; what the table has no column for does not restrict it
    const keys = Object.keys(where).filter(k => where[k] != null && this.has(k))
    if (!keys.length) return [...Array(this.rows).keys()]
    return this.index(keys).get(keys.map(k => String(where[k]) + "\u0000").join("")) || []
  }
  known(column, where) { // the numbers in a column of some rows, in order, found once
    const name = column + JSON.stringify(where)
    this.found ||= new Map()
    if (!this.found.has(name)) this.found.set(name, [...new Set(this.select(where).map(i => this.at(i, column)))].sort((a, b) => a - b))
    return this.found.get(name)
  }
}

// ---------------------------------------------------------------- elements

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

const spell = name => name.replace(PIN, ", round $1")
const percent = v => Number.isFinite(v) ? `${Math.round(v * 100)} %` : "–"
const two = v => Number.isFinite(v) ? (v < 0 ? "−" : "") + Math.abs(v).toFixed(2) : "–"
const many = (format => n => format.format(n))(new Intl.NumberFormat("en"))
const clamp = (v, low, high) => Math.min(Math.max(v, low), high)
const sum = values => values.reduce((a, b) => a + b, 0)

const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"]
const parse = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16))
const viridis = v => {
  const at = clamp(v, 0, 1) * (VIRIDIS.length - 1), i = Math.min(Math.floor(at), VIRIDIS.length - 2)
  const [a, b] = [parse(VIRIDIS[i]), parse(VIRIDIS[i + 1])]
  return `rgb(${a.map((x, k) => Math.round(x + (b[k] - x) * (at - i))).join()})`
}
const inkOn = v => v > .62 ? "#111" : "#fff"

let ruler = null
function width(text, size, weight = "") {
  ruler = ruler || document.createElement("canvas").getContext("2d")
  ruler.font = `${weight} ${size}px system-ui, sans-serif`
  return ruler.measureText(text).width
}
function short(text, room, size) { // the text, cut where it does not fit
  if (width(text, size) <= room) return text
  const letters = [...text]
  while (letters.length > 1 && width(letters.join("") + "…", size) > room) letters.pop()
  return letters.join("") + "…"
}

// ---------------------------------------------------------------- the view

const PANELS = [ // in the order of the keys 1, 2, 3 ... that jump to them
  ["matrix", "Which class, in which model?"], ["verdict", "Does the class have a circuit?"], ["circuit", "The circuit"], ["sizes", "How large must it be?"],
  ["head", "What does refitting the head repair?"], ["rounds", "Over the rounds"],
  ["images", "Which images?"], ["concepts", "Concepts"]]
const NEEDS = {matrix: null, rounds: "metrics", verdict: "circuits", circuit: "channels", sizes: "circuits", images: "answers", concepts: "concepts", head: "heads"}
const NEEDS_DEEP = ["circuits", "channels", "answers", "heads"] // which look into clients when they are asked to
const STATE = ["client", "cls", "round", "compare", "ablation", "size", "metric", "concept", "image", "channel"]
const PIN = / @ (\d+)$/ // what stands behind a model that is pinned at a round
const REFITS = ["bias only", "scale + bias", "head", "head, by steps"], LABELS = [10, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000], MAPS = {integrated_gradients: "integrated gradients", saliency: "gradient, absolute"}
const LONG = 20 // more classes than these scroll, or the strongest are drawn
const METRICS = {"AUROC": "AUROC of the circuit", "J, calibrated": "J (calibrated)", "accuracy": "accuracy"}
const WORDS = {
  "sufficient": "The lower end of its AUROC lies above every random circuit of this size.",
  "not shown": "The interval of its AUROC reaches into what random circuits of this size score.",
  "constant": "It gives the same answer to every image: a hit rate of 100 % would mean nothing.",
  "not testable": "There are too few right answers to test it.",
}

class View {
  constructor(model, el) {
    Object.assign(this, {model, el, used: {}, said: "", playing: null, open: new Set(), whole: new Set(), stale: new Set(), hidden: new Set(), replies: new Map(), asked: 0, questions: 0, brushed: null, off: [], id: `fi-${Math.random().toString(36).slice(2)}`})
    this.build()
    this.ready = readTrace(model.get("trace")).then(trace => { if (this.closed) return; this.trace = trace; this.begin() })
    this.ready.catch(error => { this.live.textContent = `This trace cannot be read: ${error.message}`; throw error })
  }

  get(key) { return this.model.get(key) }
  set(changes) {
    for (const [k, v] of Object.entries(changes)) if (this.get(k) !== v) this.model.set(k, v)
    this.model.save_changes()
    this.later()
  }
  later() { // one drawing a frame, however many changes
    this.urgent = true
    this.nextFrame()
  }
  nextFrame() {
    if (this.frame) return
    this.frame = requestAnimationFrame(() => { const first = this.urgent; this.frame = null; this.urgent = false; this.draw(first) })
  }

  build() {
    this.live = h("p", {class: "fi-live", "aria-live": "polite"})
    this.tip = h("div", {class: "fi-tip", role: "tooltip", hidden: true})
    this.controls = h("div", {class: "fi-controls", role: "group", "aria-label": "What is shown"})
    this.says = h("p", {class: "fi-says"})
    this.grid = h("div", {class: "fi-grid"})
    this.panels = {}
    for (const [i, [name, title]] of PANELS.entries()) {
      const body = h("div", {class: "fi-body"}), caption = h("p", {class: "fi-caption"}), rows = h("div", {class: "fi-rows", hidden: true, tabindex: "0", role: "region", "aria-label": `rows of ${i + 1}`})
      const tools = h("span", {class: "fi-tools"},
        h("button", {type: "button", "data-do": "table", "aria-expanded": "false", text: "table", title: "Show as table", onclick: () => this.toggle(name)}),
        h("button", {type: "button", "data-do": "csv", text: "CSV", title: "Save exactly the rows that are drawn", onclick: () => this.save(name)}),
        h("button", {type: "button", "data-do": "picture", text: "picture", title: "Save the drawing: SVG, or PNG of wiring, images and map", onclick: () => this.picture(name)}),
        h("button", {type: "button", "data-do": "code", "aria-expanded": "false", text: "code", title: "The call that makes this figure", onclick: () => this.toggleCode(name)}))
      const code = h("pre", {class: "fi-code", hidden: true}), extra = h("div", {class: "fi-extra", hidden: true})
      const node = h("section", {class: "fi-panel", "data-panel": name, tabindex: "0", "aria-label": `${i + 1}: ${title}`},
        h("header", {}, h("h3", {}, h("b", {text: i + 1}), " ", title), tools), extra, body, code, rows, caption)
      this.panels[name] = {node, body, caption, rows, extra, code}
      this.grid.append(node)
    }
    this.root = h("div", {class: "fi", "data-lm-suppress-shortcuts": "true"}, this.controls, this.says, this.grid, this.live, this.tip)
    this.root.addEventListener("keydown", e => this.key(e))
    this.root.addEventListener("mousemove", e => this.hover(e))
    this.root.addEventListener("mouseleave", () => { this.tip.hidden = true })
    this.el.append(this.root)
  }

  begin() {
    const m = this.trace.meta
    this.subject = Object.fromEntries(m.subjects.map(x => [x.name, x]))
    this.buildControls()
    this.buildLive()
    for (const key of STATE) this.on(`change:${key}`, () => this.later())
    this.on("change:projector", () => this.shape())
    this.on("change:panel", () => this.shape())
    this.on("msg:custom", message => { if (message?.alive || message?.answer) { this.heard = Date.now(); this.badge() } if (message?.answer) this.answered(message) })
    const watch = new MutationObserver(() => this.theme())
    watch.observe(document.body, {attributes: true})
    const system = matchMedia("(prefers-color-scheme: dark)"), change = () => this.theme()
    system.addEventListener("change", change)
    let last = 0
    const resize = new ResizeObserver(() => { if (Math.abs(this.root.clientWidth - last) > 2) { last = this.root.clientWidth; this.drawn = null; this.later() } if (!this.asked) this.beat() })
    resize.observe(this.root) // tells as well that the page has the view now, which may be after render
    const seen = new IntersectionObserver(found => { for (const x of found) x.isIntersecting ? this.hidden.delete(x.target.dataset.panel) : this.hidden.add(x.target.dataset.panel) }, {rootMargin: "80px"})
    for (const p of Object.values(this.panels)) seen.observe(p.node)
    this.off.push(() => seen.disconnect(), () => watch.disconnect(), () => system.removeEventListener("change", change), () => resize.disconnect())
    if (this.model.send) { const timer = setInterval(() => this.beat(), 4000); this.off.push(() => clearInterval(timer)) }
    this.badge()
    this.shape()
    this.theme()
  }
  on(event, f) { this.model.on(event, f); this.off.push(() => this.model.off(event, f)) }
  close() { this.closed = true; this.play(false); clearTimeout(this.pending?.timer); this.off.forEach(f => f()); cancelAnimationFrame(this.frame); this.root.remove() }

  theme() {
    const lab = document.body.dataset.jpThemeLight
    const dark = lab === "false" || (lab === undefined && matchMedia("(prefers-color-scheme: dark)").matches)
    this.root.dataset.theme = dark ? "dark" : "light"
    const look = getComputedStyle(this.root), get = name => look.getPropertyValue(`--fi-${name}`).trim()
    this.c = {dark, ink: get("ink"), soft: get("soft"), line: get("line"), paper: get("paper"), band: get("band"), blue: get("blue"), orange: get("orange"), green: get("green"), pink: get("pink")}
    this.drawn = null
    this.later()
  }

  beat() { if (document.hidden || !this.root.isConnected || !this.model.send) return; this.asked = Date.now(); try { this.model.send({alive: "?"}) } catch { this.heard = null } ; setTimeout(() => this.badge(), 1500) }
  badge() { // live: the kernel answers; busy: it did a moment ago; recorded: all that is here is what was recorded, and that is enough
    const quiet = Date.now() - (this.heard || 0)
    const word = !this.model.send || !this.heard || quiet > 30000 ? "recorded" : this.asked - this.heard > 1200 ? "busy" : "live"
    if (this.state) { this.state.textContent = word; this.state.dataset.word = word }
  }

  // -------------------------------------------------------------- questions to the kernel

  ask(panel, question) { // one at a time; the last one that was wanted is asked next
    this.wanted = {panel, question, key: JSON.stringify(question)}
    if (!this.pending) this.askNext()
  }
  askNext() {
    const next = this.wanted
    this.wanted = null
    if (!next || this.replies.get(next.key)?.rows || this.replies.get(next.key)?.map) return this.redo(next?.panel)
    const number = `${this.id} ${++this.questions}`, timer = setTimeout(() => this.answered({number, answer: {error: "The kernel does not answer; what was recorded is shown."}}), 20000)
    this.pending = {...next, number, timer}
    try { this.model.send({ask: next.question, number}) } catch { this.answered({number, answer: {error: "There is no kernel; what was recorded is shown."}}) }
    this.redo(next.panel)
  }
  answered({number, answer}) {
    if (number !== this.pending?.number) return
    const {panel, key, timer} = this.pending
    clearTimeout(timer)
    this.pending = null
    if (this.replies.size > 200) this.replies.delete(this.replies.keys().next().value)
    this.replies.delete(key)
    this.replies.set(key, answer)
    this.redo(panel)
    if (this.wanted) this.askNext()
  }
  redo(panel) { if (panel) { this.stale.add(panel); this.later() } }

  buildLive() { // controls that outlive a drawing, so that they can be dragged
    const label = (text, node, ...more) => h("label", {}, h("span", {text}), node, ...more), heard = () => this.refit()
    const range = (key, max, value, name) => h("input", {type: "range", "data-live": key, min: 0, max, step: 1, value, "aria-label": name, oninput: heard})
    const how = h("select", {"data-live": "how", "aria-label": "refit", onchange: heard}, ["recorded", ...REFITS].map(v => h("option", {value: v, text: v === "recorded" ? "as recorded" : v})))
    this.knobs = {how, labels: range("labels", LABELS.length - 1, 7, "labels"), draw: range("draw", 19, 0, "draw of the labels"), lr: range("lr", 20, 5, "learning rate")}
    this.readings = Object.fromEntries(["labels", "draw", "lr", "took"].map(k => [k, h("output", {"data-reading": k})]))
    const method = h("select", {"data-live": "method", "aria-label": "attribution"}, Object.entries(MAPS).map(([value, text]) => h("option", {value, text}))), r = this.readings
    this.method = method
    this.lit = h("button", {type: "button", "data-do": "attribute", text: "attribute", title: "Which pixels carry the class's margin?", onclick: () => this.attribute()})
    const none = text => h("span", {class: "fi-soft", text}), {head, images} = this.panels
    fill(head.extra, {}, this.model.send ? [label("refit", how), label("labels", this.knobs.labels, r.labels), label("draw", this.knobs.draw, r.draw), label("rate", this.knobs.lr, r.lr), r.took] : [none("Recorded: refitting with other labels needs a kernel.")])
    fill(images.extra, {}, this.model.send ? [label("pixels of the chosen image", method), this.lit] : [none("Recorded: attributions are computed by a kernel.")])
    this.readKnobs()
  }
  readKnobs() {
    const {how, labels, draw, lr} = this.knobs, live = how.value !== "recorded", found = {how: how.value, labels: LABELS[labels.value], draw: Number(draw.value), lr: Number((10 ** (-4 + lr.value / 5)).toPrecision(2))}
    labels.disabled = draw.disabled = !live
    lr.disabled = how.value !== "head, by steps"
    for (const k of ["labels", "draw", "lr"]) {
      this.readings[k].textContent = this.knobs[k].disabled ? "–" : found[k]
      this.knobs[k].setAttribute("aria-valuetext", found[k]) // the number that it stands for, not the notch
    }
    return found
  }
  refit() { // asks for a head; what it answers is drawn beside what was recorded
    const {how, labels, draw, lr} = this.readKnobs(), who = this.of(this.at.client)
    this.live_ = how === "recorded" ? null : {what: "head", run: who.run, client: who.client, round: this.at.round, seed: this.trace.meta.seed, how, labels, draw, ...(how === "head, by steps" ? {lr} : {})}
    if (this.live_) this.ask("head", this.live_)
    else this.redo("head")
  }
  attribute() {
    const now = this.at, who = this.of(now.client)
    this.lit_ = {what: "attribution", run: who.run, client: who.client, round: this.roundOf(this.trace.tables.answers) ?? now.round, cls: now.cls, image: now.image, seed: this.trace.meta.seed, method: this.method.value}
    this.ask("images", this.lit_)
  }

  // -------------------------------------------------------------- controls

  buildControls() {
    const m = this.trace.meta, pick = (label, key, choices, name = x => x) => {
      const node = h("select", {"data-key": key, "aria-label": label, onchange: e => this.set({[key]: e.target.value})},
        choices.map(v => h("option", {value: v, text: name(v)})))
      return h("label", {}, h("span", {text: label}), node)
    }
    const names = m.subjects.map(x => x.name), said = n => n === "" ? "nothing" : n
    const slider = h("input", {type: "range", "data-key": "round", "aria-label": "round", min: m.rounds[0], max: m.rounds[m.rounds.length - 1], step: 1,
      oninput: e => this.set({round: nearest(m.rounds, Number(e.target.value))})})
    this.playButton = h("button", {type: "button", "data-do": "play", "aria-label": "play", text: "▶", onclick: () => this.play(!this.playing)})
    this.roundSays = h("output", {})
    this.state = h("span", {class: "fi-badge", role: "status", title: "live: the kernel answers; recorded: everything shown is in this page"})
    this.tabs = h("nav", {class: "fi-tabs", "aria-label": "Panels"}, PANELS.map(([name, title], i) =>
      h("button", {type: "button", "data-tab": name, title: `${title} (key ${i + 1})`, "aria-label": title, text: i + 1, onclick: () => this.set({panel: name})})))
    fill(this.controls, {}, [
      pick("model", "client", names), pick("class", "cls", m.classes), h("span", {class: "fi-pin"}, pick("beside", "compare", ["", ...names], said), h("button", {type: "button", "data-do": "pin", text: "pin", title: "Keep what is shown now, to stand beside what is chosen next (key p)", onclick: () => this.pin()})),
      m.rounds.length > 1 && h("label", {class: "fi-round"}, h("span", {text: "round"}), h("span", {class: "fi-slide"}, this.playButton, slider, this.roundSays)),
      m.sizes.length > 1 && pick("circuit size", "size", m.sizes, v => Number(v) <= 1 ? percent(Number(v)) : v),
      m.ablations.length > 1 && pick("ablation", "ablation", m.ablations),
      pick("matrix shows", "metric", Object.keys(METRICS), k => METRICS[k]),
      h("span", {class: "fi-right"}, this.tabs, h("button", {type: "button", "data-do": "projector", "aria-pressed": "false", text: "projector", title: "Large type, one panel at a time",
        onclick: () => this.set({projector: !this.get("projector")})}), this.state)])
    this.says.textContent = m.verdict
  }
  pin() { this.set({compare: this.trace.meta.rounds.length > 1 ? `${this.get("client")} @ ${this.get("round")}` : this.get("client")}) }
  play(on) {
    clearInterval(this.playing)
    this.playing = null
    const rounds = this.trace && this.trace.meta.rounds
    if (on) {
      if (this.get("round") === rounds[rounds.length - 1]) this.set({round: rounds[0]})
      this.playing = setInterval(() => this.step(1) || this.play(false), 700)
    }
    if (this.playButton) { this.playButton.textContent = this.playing ? "❚❚" : "▶"; this.playButton.setAttribute("aria-label", this.playing ? "pause" : "play") }
  }
  step(by) {
    const rounds = this.trace.meta.rounds, at = rounds.indexOf(nearest(rounds, this.get("round"))) + by
    if (at < 0 || at >= rounds.length) return false
    this.set({round: rounds[at]})
    return true
  }
  shape() { // one panel in large type, or all of them
    const big = this.get("projector"), shown = this.get("panel")
    this.root.classList.toggle("fi-big", big)
    this.root.dataset.shown = shown
    this.controls.querySelector("[data-do=projector]").setAttribute("aria-pressed", String(big))
    for (const [name, p] of Object.entries(this.panels)) p.node.hidden = big && name !== shown
    for (const tab of this.tabs.children) tab.setAttribute("aria-current", String(tab.dataset.tab === shown))
    this.drawn = null
    this.later()
  }

  // -------------------------------------------------------------- keys and pointer

  key(e) {
    e.stopPropagation()
    if (e.ctrlKey || e.metaKey || e.altKey || !this.trace) return
    const typing = e.target.matches("input:not([type=range]), textarea")
    if (typing && e.key !== "Escape") return
    const name = e.target.closest("[data-panel]")?.dataset.panel, own = e.target.matches("select, input, button, .fi-rows")
    const number = "123456789".indexOf(e.key)
    const shift = (list, key, by) => { const at = list.indexOf(this.get(key)); this.set({[key]: list[clamp(at + by, 0, list.length - 1)]}) }
    const m = this.trace.meta, by = {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1}[e.key], along = e.key === "ArrowLeft" || e.key === "ArrowRight"
    if (e.key === "[" || e.key === "]") this.step(e.key === "[" ? -1 : 1)
    else if (number >= 0 && number < PANELS.length && !e.target.matches("select")) this.focus(PANELS[number][0])
    else if (e.key === "p" && !own) this.pin()
    else if (e.key === "Escape") { this.play(false); this.brushed = null; this.drawn = null; this.set({channel: "", image: -1}); this.panels[name]?.node.focus() }
    else if (own || !name) return
    else if (e.key === "Enter") { if (name === "circuit") this.pinFirst(); else if (name === "matrix") this.focus("verdict"); else return }
    else if (!by) return
    else if (name === "rounds") this.step(by)
    else if (name === "sizes" || (name === "verdict" && !along)) m.sizes.length && shift(m.sizes, "size", by)
    else if (name === "matrix" && !along) shift(m.subjects.map(x => x.name), "client", by)
    else if (name === "concepts") this.nextConcept(by)
    else if (name === "images" && along) this.nextImage(by)
    else if (name === "circuit") this.nextChannel(by, along)
    else shift(m.classes, "cls", by)
    e.preventDefault()
  }
  focus(name) {
    this.set({panel: name})
    if (this.get("projector")) this.shape()
    this.panels[name].node.focus()
    this.panels[name].node.scrollIntoView({block: "nearest", behavior: "auto"})
  }
  hover(e) {
    const from = e.target.closest("[data-tip]"), text = from ? from.dataset.tip : e.target.tipAt ? e.target.tipAt(e) : ""
    this.tip.hidden = !text
    if (!text) return
    this.tip.textContent = text
    const box = this.root.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top
    this.tip.style.left = `${clamp(x + 14, 0, Math.max(box.width - this.tip.offsetWidth - 4, 0))}px`
    this.tip.style.top = `${y + 18}px`
  }

  // -------------------------------------------------------------- drawing

  draw(first) { // what is on the screen in the first frame, the rest in the next
    if (!this.trace || !this.root.isConnected || !this.c) return
    const now = Object.fromEntries(STATE.map(k => [k, this.get(k)])), size = parseFloat(getComputedStyle(this.root).fontSize)
    const beside = this.controls.querySelector("[data-key=compare]"), extra = beside.querySelector("[data-pinned]")
    if (PIN.test(now.compare) && extra?.value !== now.compare) { extra?.remove(); beside.append(h("option", {value: now.compare, text: now.compare.replace(" @ ", ", round "), "data-pinned": true})) }
    for (const node of this.controls.querySelectorAll("[data-key]")) if (node.value !== String(now[node.dataset.key])) node.value = now[node.dataset.key]
    if (this.roundSays) this.roundSays.textContent = now.round
    this.at = now
    const depends = {matrix: ["client", "cls", "round", "ablation", "size", "metric"], rounds: ["client", "cls", "round", "compare"], verdict: STATE.slice(0, 6),
      circuit: [...STATE.slice(0, 6), "channel"], sizes: STATE.slice(0, 6), images: ["client", "cls", "round", "compare", "ablation", "size", "image"], concepts: ["client", "cls", "concept", "image", "compare"], head: ["client", "cls", "round", "compare"]}
    if (this.live_ && this.drawn && ["client", "round"].some(k => this.drawn[k] !== now[k])) this.refit() // a live head follows
    const due = PANELS.map(([name]) => name).filter(name => !this.panels[name].node.hidden && !(this.drawn && !this.stale.has(name) && depends[name].every(k => this.drawn[k] === now[k])))
    const moved = this.drawn && !this.stale.has("matrix") && ["round", "ablation", "size", "metric"].every(k => this.drawn[k] === now[k]) // only what is chosen
    this.stale.clear()
    if (moved && due[0] === "matrix" && this.choose()) due.shift()
    const wait = first ? due.filter(name => this.hidden.has(name)) : []
    if (wait.length < due.length) for (const name of wait) due.splice(due.indexOf(name), 1)
    else wait.length = 0
    const rooms = due.map(name => this.panels[name].body.clientWidth || 400) // all are read before any is changed: one layout, not seven
    for (const [i, name] of due.entries()) {
      this.used[name] = []
      const p = this.panels[name], room = rooms[i], need = NEEDS[name]
      const found = need && !this.trace.tables[need] ? this.missing(need) : this[name](room, size)
      p.extra.hidden = !p.extra.childNodes.length || (need && !this.trace.tables[need])
      const active = this.root.getRootNode().activeElement, held = p.body.contains(active) ? active.dataset.do : null
      if (found.nodes) p.body.replaceChildren(...[found.nodes].flat())
      if (held !== null) (held && p.body.querySelector(`[data-do="${held}"]`) || p.node).focus({preventScroll: true}) // the same button, drawn anew
      const rows = this.used[name].length > 0, able = {table: rows, csv: rows, picture: !!p.body.querySelector("svg[role=img], canvas[role=img]")}
      for (const [word, can] of Object.entries(able)) {
        const tool = p.node.querySelector(`.fi-tools [data-do=${word}]`)
        if (!can && tool === active) p.node.focus({preventScroll: true})
        tool.hidden = !can
      }
      const on = this.trace.meta.classes.length > LONG && p.body.querySelector(".fi-scroll .fi-rowon"), box = on && on.closest(".fi-scroll")
      if (box) box.scrollTop = on.getAttribute("y") - box.clientHeight / 2
      p.caption.replaceChildren(...[found.caption].flat().filter(Boolean))
      if (this.open.has(name)) this.fillRows(name)
    }
    for (const [name, p] of Object.entries(this.panels)) if (!p.code.hidden) p.code.textContent = this.code(name)
    this.drawn = now
    this.say()
    for (const name of wait) this.stale.add(name)
    if (wait.length) this.nextFrame()
    else this.model.drawn?.(now)
  }
  missing(table, who) {
    const call = this.trace.meta.calls[table]
    const why = who ? `Nothing of this kind was computed for ${who}.` : "This was not computed."
    const about = who && this.of(who), client = about && about.client !== "server" && about.run === this.trace.meta.subjects[0].run && NEEDS_DEEP.includes(table)
    const does = client ? "This call looks into every client that the run has kept:" : who ? "It was for the models of this call:" : "This call computes it, and a new explorer shows it:"
    return {nodes: h("div", {class: "fi-missing"}, h("p", {text: why}), call && h("p", {text: does}), call && h("pre", {}, h("code", {text: client ? call.replace(/\)$/, ", deep=True)") : call})))}
  }
  use(panel, table, rows) { this.used[panel].push([table, rows]); return rows }
  say() {
    const now = this.at, row = this.trial("AUROC", "circuit", now.client), t = this.trace.tables.circuits
    const text = `${now.client}, ${now.cls}, round ${now.round}` + (row == null ? "" : `: ${t.at(row, "verdict") || "circuit"}, AUROC ${two(t.at(row, "value"))}`)
    if (text !== this.said) this.live.textContent = this.said = text
  }

  of(name) { return this.subject[name.replace(PIN, "")] || {} } // a model's run and client
  // rows of one model; a table without rounds or clients speaks of the last server
  where(table, name, more = {}) {
    const who = this.of(name), rows = {run: who.run, client: who.client, ...more}
    if (!table.has("client") && who.client !== "server") return null
    return rows
  }
  roundOf(table, name = this.at.client) { // the examined round of a model that is nearest to the chosen one, or to the one that it is pinned at
    if (!table.has("round")) return null
    const who = this.of(name), asked = this.asks(name)
    const known = table.known("round", Object.fromEntries(["run", "client"].filter(c => table.has(c) && who[c] != null).map(c => [c, who[c]])))
    return known.length ? nearest(known, asked) : asked
  }
  asks(name) { const pinned = PIN.exec(name); return pinned ? Number(pinned[1]) : this.at.round }
  note(table) { // says so, where what is shown of a model is of another round than it says, or where there is nothing to show beside it
    const said = this.shown().map((name, k) => {
      const bare = name.replace(PIN, ""), r = this.roundOf(table, name)
      if (k && !(this.where(table, name) && table.select(this.where(table, name)).length)) return ` Nothing of this kind was computed for ${bare}.`
      return r == null || r === this.asks(name) ? "" : ` ${k ? `${bare}: of` : "Of"} round ${r}, the nearest examined.`
    }).join("")
    return said ? h("span", {class: "fi-note", text: said}) : null
  }
  trial(metric, of, name, more = {}) {
    const t = this.trace.tables.circuits, w = t && this.where(t, name, {round: this.roundOf(t, name), cls: this.at.cls, budget: this.at.size, ablation: this.at.ablation || null, metric, of, ...more})
    return w ? t.select(w)[0] : undefined
  }
  count(t, rows) { // of test images, as n is said: one number, or from the least to the most
    const n = rows.map(i => t.at(i, "n")), [least, most] = [Math.min(...n), Math.max(...n)]
    return least === most ? many(most) : `${many(least)}–${many(most)}`
  }
  interval(t, i, form = two) { return i == null ? "–" : `${form(t.at(i, "value"))} [${form(t.at(i, "lo"))}, ${form(t.at(i, "hi"))}]` }
  // "server (Dirichlet 0.1)"
  label(name) { const x = this.of(name); return x.run ? (x.label && x.client === "server" ? `${name} (${x.label})` : name) : "" }
  shown() { return [this.at.client, this.at.compare].filter((n, i, all) => n && all.indexOf(n) === i) }
  colour(name) { return name === this.at.client ? this.c.blue : this.c.orange }

  legend(items) { // [words, svg marks]
    return h("p", {class: "fi-legend"}, items.map(([words, ...marks]) => h("span", {}, s("svg", {class: "fi-key", viewBox: "0 0 26 14", "aria-hidden": "true"}, marks), words)))
  }
  mark(x, y, r, shape, paint) { // circle or diamond, filled or hollow
    const look = paint.hollow ? {fill: this.c.paper, stroke: paint.hollow, "stroke-width": Math.max(r * .4, 1.6)} : {fill: paint.fill}
    return shape === "diamond" ? s("path", {d: `M${x} ${y - r * 1.25}L${x + r * 1.25} ${y}L${x} ${y + r * 1.25}L${x - r * 1.25} ${y}Z`, ...look}) : s("circle", {cx: x, cy: y, r, ...look})
  }

  // ---- A

  matrix(W, u) {
    const {meta, tables} = this.trace, now = this.at, accuracy = now.metric === "accuracy", t = accuracy ? tables.metrics : tables.circuits, counts = tables.counts
    this.chosen = null
    if (!t && !counts) return this.missing("circuits")
    const names = meta.subjects.map(x => x.name), n = meta.classes.length
    const left = Math.min(Math.max(...names.map(x => width(x, u, "bold"))) + u, W * .34), row = u * 1.95
    const longest = Math.min(Math.max(...meta.classes.map(c => width(c, u, "bold"))), u * 8), turned = longest > (W - left) / n - 6, lean = turned ? longest * .71 + u * .2 - (W - left) / n / 2 : 0
    const cell = Math.max((W - left - 2 - Math.max(lean, 0)) / n, u * 1.15), top = turned ? longest * .71 + u * 1.2 : u * 1.7
    const full = left + cell * n + 2, H = top + row * names.length + 2, cells = [], most = counts ? Math.max(...counts.of.value.data.filter((_, i) => counts.at(i, "cls") !== "all" && counts.at(i, "metric") === "samples"), 1) : 1
    meta.classes.forEach((c, j) => {
      const x = left + cell * (j + .5), y = top - u * .5
      cells.push(s("text", {x, y, "data-column": c, "text-anchor": turned ? "start" : "middle", transform: turned ? `rotate(-45 ${x} ${y})` : null, "data-tip": c, text: short(c, turned ? longest : cell, u)}))
    })
    const drawn = [], held = []
    names.forEach((name, i) => {
      const y = top + row * i, who = this.subject[name]
      cells.push(s("text", {x: left - u * .6, y: y + row / 2, "text-anchor": "end", "dominant-baseline": "central", "data-row": name, "data-tip": `${name}: ${who.label}`, text: short(name, left - u, u)}))
      meta.classes.forEach((c, j) => {
        const x = left + cell * j, at = t && this.where(t, name, {round: this.roundOf(t, name), cls: c, metric: now.metric, ...(accuracy ? {} : {budget: now.size, ablation: now.ablation || null, of: "circuit"})})
        const k = at ? t.select(at)[0] : undefined, v = k == null ? NaN : t.at(k, "value"), empty = !Number.isFinite(v)
        const rival = accuracy || k == null ? undefined : t.select({...at, of: "random"})[0], weak = rival != null && !(t.at(k, "lo") > t.at(rival, "hi"))
        if (k != null) drawn.push(k)
        if (rival != null) drawn.push(rival)
        const h0 = counts && who.client !== "server" ? counts.select({run: who.run, client: who.client, cls: c, metric: "samples"})[0] : undefined
        if (h0 != null) held.push(h0)
        const images = h0 == null ? null : counts.at(h0, "value")
        const tip = `${name}, ${c}: ` + (empty ? "not measured" : `${METRICS[now.metric]} ${this.interval(t, k)}`) + (rival == null ? "" : `; random circuits ${this.interval(t, rival)}${weak ? ", which it is not above" : ""}`) + (images == null ? "" : `; trained on ${many(images)} images`)
        const scaled = accuracy ? v : now.metric === "AUROC" ? (v - .5) * 2 : v
        cells.push(s("g", {class: "fi-cell", "data-client": name, "data-cls": c, "data-tip": tip, onclick: () => this.set({client: name, cls: c})},
          s("rect", {x: x + 1, y: y + 1, width: cell - 2, height: row - 2, rx: 2, fill: empty ? `url(#${this.id})` : viridis(scaled)}),
          !empty && cell > u * 2.3 && s("text", {x: x + cell * (images > 0 ? .38 : .5), y: y + row / 2, "text-anchor": "middle", "dominant-baseline": "central", class: "fi-small", style: `fill:${inkOn(scaled)}`, text: accuracy ? Math.round(v * 100) : two(v)}),
          !empty && weak && s("circle", {cx: x + cell - u * .45, cy: y + u * .45, r: u * .22, fill: "none", stroke: inkOn(scaled), "stroke-width": 1.5}),
          images > 0 && s("circle", {cx: x + (empty ? cell / 2 : cell - Math.min(row, cell) * .3), cy: y + row * (empty ? .5 : .6), r: Math.max(Math.sqrt(images / most) * Math.min(row, cell) * (empty ? .42 : .22), 1), fill: empty ? this.c.soft : inkOn(scaled), opacity: empty ? 1 : .75})))
      })
    })
    if (drawn.length) this.use("matrix", t, drawn)
    if (held.length) this.use("matrix", counts, held)
    const svg = s("svg", {width: full + Math.max(lean, 0), height: H, role: "img", "aria-label": `${METRICS[now.metric]} by model and class`},
      s("defs", {}, s("pattern", {id: this.id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"}, s("rect", {width: 6, height: 6, fill: this.c.paper}), s("line", {x1: 0, x2: 0, y1: 0, y2: 6, stroke: this.c.line, "stroke-width": 2.2}))), cells)
    const frame = s("rect", {width: cell, height: row, rx: 3, class: "fi-chosen"})
    svg.append(frame)
    this.chosen = {svg, frame, names, left, top, cell, row}
    this.choose()
    const ends = accuracy ? ["0 %", "100 %"] : now.metric === "AUROC" ? ["≤ 0.5", "1"] : ["≤ 0", "1"]
    const bar = h("span", {}, ends[0] + " ", h("i", {class: "fi-bar", style: `background:linear-gradient(90deg,${VIRIDIS.join()})`}), " " + ends[1])
    const keys = this.legend([["not measured", s("rect", {x: 4, y: 0, width: 18, height: 14, fill: `url(#${this.id})`})],
      !accuracy && ["not above random circuits", s("circle", {cx: 13, cy: 7, r: 4, fill: "none", stroke: "currentColor", "stroke-width": 1.5})], held.length && ["images held", s("circle", {cx: 13, cy: 7, r: 6, fill: this.c.soft})]].filter(Boolean))
    keys.prepend(bar)
    const count = t && drawn.length ? `n = ${this.count(t, drawn)} test images${accuracy ? " a class" : ""}; intervals on each cell (point at it, or table). ` : ""
    const off = t ? names.map(x => [x, this.roundOf(t, x)]).filter(([, r]) => r != null && r !== now.round).map(([x, r]) => `${x} (round ${r})`) : []
    const late = off.length ? h("span", {class: "fi-note", text: `Of another round, the nearest examined: ${off.slice(0, 4).join(", ")}${off.length > 4 ? ` and ${off.length - 4} more` : ""}.`}) : null
    return {nodes: [h("div", {class: "fi-scroll"}, svg), keys], caption: [`${METRICS[now.metric]}${accuracy ? "" : `, circuits of ${percent(Number(now.size))} of the channels`}. ${count}`, late]}
  }

  choose() { // moves the frame to the chosen cell; false: there is no matrix to move it in
    if (!this.chosen) return false
    const {svg, frame, names, left, top, cell, row} = this.chosen, now = this.at
    for (const label of svg.querySelectorAll("[data-column], [data-row]")) label.classList.toggle("fi-on", label.dataset.column === now.cls || label.dataset.row === now.client)
    frame.setAttribute("x", left + cell * this.trace.meta.classes.indexOf(now.cls))
    frame.setAttribute("y", top + row * names.indexOf(now.client))
    return true
  }

  // ---- a plot with axes, for B and E

  plot(W, H, u, {x, y, series, cursor, pinned, xlabel, ylabel, form, xform, pick, ticks, label}) {
    const left = u * 3.4, bottom = u * 2.6, top = u * .8, right = u * 1.2
    const pad = u * 1.1, X = v => left + pad + (v - x[0]) / (x[1] - x[0] || 1) * (W - left - right - pad), Y = v => H - bottom - (v - y[0]) / (y[1] - y[0] || 1) * (H - bottom - top)
    const nodes = []
    for (const v of [y[0], (y[0] + y[1]) / 2, y[1]]) nodes.push(s("line", {x1: left, x2: W - right, y1: Y(v), y2: Y(v), class: "fi-rule"}), s("text", {x: left - u * .5, y: Y(v), "text-anchor": "end", "dominant-baseline": "central", class: "fi-soft", text: form(v)}))
    let last = -Infinity
    for (const v of ticks) { const text = xform(v), w = width(text, u) / 2 + 5; if (X(v) - w > last) { last = X(v) + w; nodes.push(s("text", {x: X(v), y: H - bottom + u * 1.1, "text-anchor": "middle", class: "fi-soft", text})) } }
    nodes.push(s("text", {x: (left + W - right) / 2, y: H - 2, "text-anchor": "middle", class: "fi-soft", text: xlabel}))
    if (cursor != null) nodes.push(s("line", {x1: X(cursor), x2: X(cursor), y1: top, y2: H - bottom, class: "fi-cursor"}))
    if (pinned != null) nodes.push(s("line", {x1: X(pinned), x2: X(pinned), y1: top, y2: H - bottom, class: "fi-cursor", style: `stroke:${this.c.orange}`}))
    const path = (points, f) => points.map((p, i) => `${i ? "L" : "M"}${X(p.x)} ${f(p)}`).join("")
    const ribbon = points => path(points, p => Y(clamp(p.hi, ...y))) + [...points].reverse().map(p => `L${X(p.x)} ${Y(clamp(p.lo, ...y))}`).join("") + "Z"
    for (const one of series) {
      const points = one.points.filter(p => Number.isFinite(p.v)), ranged = points.filter(p => Number.isFinite(p.lo))
      if (one.ribbon && ranged.length > 1) nodes.push(s("path", {d: ribbon(ranged), fill: one.colour, opacity: one.ribbon}))
      else if (ranged.length) nodes.push(...ranged.map(p => s("line", {x1: X(p.x), x2: X(p.x), y1: Y(clamp(p.lo, ...y)), y2: Y(clamp(p.hi, ...y)), stroke: one.colour, "stroke-width": one.wide || 1.8, opacity: one.wide ? .5 : 1})))
      if (points.length > 1 && !one.loose) nodes.push(s("path", {d: path(points, p => Y(p.v)), fill: "none", stroke: one.colour, "stroke-width": one.thin ? 1.6 : 2.6, "stroke-dasharray": one.dash, "stroke-linejoin": "round"}))
      for (const p of points) { const m = this.mark(X(p.x), Y(p.v), one.thin ? u * .2 : u * .3, one.shape, one.hollow ? {hollow: one.colour} : {fill: one.colour}); m.dataset.tip = p.tip; nodes.push(m) }
    }
    const svg = s("svg", {width: W, height: H, role: "img", "aria-label": label}, nodes)
    if (pick) svg.addEventListener("click", e => pick(x[0] + (e.clientX - svg.getBoundingClientRect().left - left - pad) / (W - left - right - pad) * (x[1] - x[0])))
    return h("div", {}, h("p", {class: "fi-axis", text: ylabel}), svg)
  }

  // ---- B

  rounds(W, u) {
    const {tables, meta} = this.trace, now = this.at, t = tables.metrics, series = [], keys = [], who = [...new Set([...this.shown(), "server", "reference"].map(n => n.replace(PIN, "")))].filter(n => this.subject[n]), pinned = PIN.exec(now.compare)
    const looks = [{colour: this.c.blue}, {colour: this.c.orange, dash: "7 4", shape: "diamond", hollow: true}, {colour: this.c.green, dash: "2 3"}, {colour: this.c.pink, dash: "9 3 2 3", shape: "diamond"}]
    const points = (table, rows, name) => rows.map(i => ({x: table.at(i, "round") ?? now.round, v: table.at(i, "value"), lo: table.at(i, "lo"), hi: table.at(i, "hi"), tip: `${name}, round ${table.at(i, "round")}: ${this.interval(table, i)}`})).sort((a, b) => a.x - b.x)
    who.forEach(name => {
      const rows = t.select({run: this.subject[name].run, client: this.subject[name].client, cls: now.cls, metric: "accuracy"})
      if (!rows.length) return
      this.use("rounds", t, rows)
      const look = looks[series.length % looks.length]
      series.push({...look, ribbon: .18, points: points(t, rows, name)})
      keys.push([name, s("line", {x1: 0, x2: 26, y1: 7, y2: 7, stroke: look.colour, "stroke-width": 2.6, "stroke-dasharray": look.dash}), this.mark(13, 7, 3.6, look.shape, look.hollow ? {hollow: look.colour} : {fill: look.colour})])
    })
    const p = tables.probes
    if (p && this.subject[now.client].client === "server") for (const [metric, word, shape] of [["probe", "probe", "diamond"], ["floor untrained", "its floor: untrained backbone", "circle"]]) {
      const rows = p.select({run: this.subject[now.client].run, client: "server", cls: now.cls, metric})
      if (!rows.length) continue
      this.use("rounds", p, rows)
      const colour = metric === "probe" ? this.c.green : this.c.soft
      series.push({colour, shape, hollow: metric !== "probe", loose: rows.length < 2, ribbon: rows.length > 1 ? .15 : 0, points: points(p, rows, word)})
      keys.push([word, this.mark(13, 7, 4, shape, metric === "probe" ? {fill: colour} : {hollow: colour})])
    }
    const x = [meta.rounds[0], meta.rounds[meta.rounds.length - 1]], common = {x, xform: String, xlabel: "round", ticks: meta.rounds, cursor: now.round, pinned: pinned && Number(pinned[1]), pick: v => this.set({round: nearest(meta.rounds, v)})}
    const o = tables.overlap, kinds = o && o.values("round").length > 1 ? [["stability", this.c.blue, null], ["consistency", this.c.green, "7 4"], ["preservation", this.c.orange, "2 3"], ["noise floor", this.c.soft, "9 3 2 3"]] : []
    const lines = kinds.map(([name, colour, dash]) => ({name, colour, dash, ribbon: .15, rows: o.select({run: this.of(now.client).run, cls: now.cls, site: "all", metric: `${name} adjusted`})})).filter(l => l.rows.length)
    for (const l of lines) { this.use("rounds", o, l.rows); l.points = points(o, l.rows, l.name) }
    const nodes = [this.plot(W, u * (lines.length ? 16 : 23), u, {...common, y: [0, 1], series, form: percent, ylabel: `accuracy, ${now.cls}`, label: `accuracy over the rounds for ${who.join(", ")}`}), this.legend(keys)]
    if (lines.length) nodes.push(this.plot(W, u * 13, u, {...common, y: [Math.floor(Math.min(0, ...lines.flatMap(l => l.points.flatMap(p => [p.v, p.lo])).filter(Number.isFinite)) * 5) / 5, 1], series: lines, form: two, ylabel: `overlap of circuits, adjusted for chance, ${now.cls}`, label: "overlap over the rounds"}),
      this.legend(lines.map(l => [l.name, s("line", {x1: 0, x2: 26, y1: 7, y2: 7, stroke: l.colour, "stroke-width": 2.6, "stroke-dasharray": l.dash})])))
    const own = this.used.rounds.filter(([table]) => table === t).flatMap(([, rows]) => rows)
    return {nodes, caption: `${own.length ? `n = ${this.count(t, own)} test images of the class; bands and bars` : "Bars"}: 95 % intervals.${lines.length ? " Overlap: the mean over pairs of circuits; bands over repeated searches." : ""} Click, or [ and ], to choose the round.`}
  }

  // ---- C

  verdict(W, u) {
    const t = this.trace.tables.circuits, now = this.at, own = this.trial("AUROC", "circuit", now.client)
    if (own == null) return this.missing("circuits", now.client)
    const word = t.at(own, "verdict") || "not decided", rows = [own], get = (metric, of, name = now.client) => { const i = this.trial(metric, of, name); if (i != null) rows.push(i); return i }
    const other = now.compare && now.compare !== now.client && this.trial("AUROC", "circuit", now.compare) != null ? now.compare : null
    const ends = [["J, calibrated", "circuit"], ["J, calibrated", "random"], ["AUROC", "random"]].map(([m, of]) => this.trial(m, of, now.client)).filter(i => i != null).map(i => t.at(i, "lo")).filter(Number.isFinite)
    const low = Math.floor(Math.min(0, ...ends) * 4) / 4, left = width("TPR · FPR", u) + u * 1.3, wide = W - left - u * 1.2, X = v => left + (clamp(v, low, 1) - low) / (1 - low) * wide, high = u * 3.9, nodes = []
    for (const v of [...(low < 0 ? [low] : []), 0, .25, .5, .75, 1]) nodes.push(s("line", {x1: X(v), x2: X(v), y1: u * .4, y2: high * 3 + u * .4, class: "fi-rule"}), s("text", {x: X(v), y: high * 3 + u * 1.6, "text-anchor": "middle", class: "fi-soft", text: String(v).replace("-", "−")}))
    const known = (i, ...columns) => columns.every(c => Number.isFinite(t.at(i, c)))
    const bar = (i, y, colour) => known(i, "lo", "hi") && s("line", {x1: X(t.at(i, "lo")), x2: X(t.at(i, "hi")), y1: y, y2: y, stroke: colour, "stroke-width": 2.4})
    const dot = (i, y, paint, shape, tip) => { if (!known(i, "value")) return null; const m = this.mark(X(t.at(i, "value")), y, u * .38, shape, paint); m.dataset.tip = tip; return m }
    const lines = [["TPR", "TPR · FPR"], ["J, calibrated", "J"], ["AUROC", "AUROC"]]
    lines.forEach(([metric, name], r) => {
      const y = u * .4 + high * (r + .5), rates = metric === "TPR"
      nodes.push(s("text", {x: left - u, y, "text-anchor": "end", "dominant-baseline": "central", text: name}))
      if (!rates) {
        const random = get(metric, "random"), full = get(metric, "full model")
        if (random != null && known(random, "value", "lo", "hi")) nodes.push(s("rect", {x: X(t.at(random, "lo")), width: Math.max(X(t.at(random, "hi")) - X(t.at(random, "lo")), 1), y: y - high * .36, height: high * .72, class: "fi-band", "data-tip": `${t.at(random, "draws")} random circuits of this size, worst to best: ${this.interval(t, random)}`}),
          s("line", {x1: X(t.at(random, "value")), x2: X(t.at(random, "value")), y1: y - high * .36, y2: y + high * .36, class: "fi-mid"}))
        if (full != null && known(full, "value")) nodes.push(s("line", {x1: X(t.at(full, "value")), x2: X(t.at(full, "value")), y1: y - high * .42, y2: y + high * .42, class: "fi-full", "data-tip": `full model: ${this.interval(t, full)}`}))
      }
      [[now.client, this.c.blue, "circle", other ? -u * .55 : 0], other && [other, this.c.orange, "diamond", u * .55]].filter(Boolean).forEach(([who, colour, shape, dy]) => {
        if (rates) {
          const [hit, miss] = ["TPR, calibrated", "FPR, calibrated"].map(k => get(k, "circuit", who))
          if (hit == null || miss == null) return
          nodes.push(known(hit, "value") && known(miss, "value") && s("line", {x1: X(t.at(miss, "value")), x2: X(t.at(hit, "value")), y1: y + dy, y2: y + dy, stroke: colour, "stroke-width": 1.4, "stroke-dasharray": "2 3"}), bar(hit, y + dy, colour), bar(miss, y + dy, colour),
            dot(miss, y + dy, {hollow: colour}, shape, `${who}: FPR ${this.interval(t, miss)}`), dot(hit, y + dy, {fill: colour}, shape, `${who}: TPR ${this.interval(t, hit)}`))
        } else {
          const i = who === now.client && metric === "AUROC" ? own : get(metric, "circuit", who)
          if (i != null) nodes.push(bar(i, y + dy, colour), dot(i, y + dy, {fill: colour}, shape, `${who}: ${name} ${this.interval(t, i)}`))
        }
      })
    })
    this.use("verdict", t, [...new Set(rows)])
    const svg = s("svg", {width: W, height: high * 3 + u * 2, role: "img", "aria-label": `TPR, FPR, J and AUROC of the circuit for ${now.cls}`}, nodes)
    const number = m => { const i = this.trial(m, "circuit", now.client); return i == null ? "–" : this.interval(t, i) }
    const card = h("dl", {class: "fi-figures"}, [["TPR", "TPR, calibrated"], ["FPR", "FPR, calibrated"], ["J", "J, calibrated"], ["AUROC", "AUROC"]].map(([k, m]) => h("div", {}, h("dt", {text: k}), h("dd", {"data-figure": k, text: number(m)}))))
    const keys = this.legend([[now.client, this.mark(13, 7, 4.5, "circle", {fill: this.c.blue})], other && [spell(other), this.mark(13, 7, 4.5, "diamond", {fill: this.c.orange})], ["hollow: FPR", this.mark(13, 7, 4.5, "circle", {hollow: this.c.blue})],
      ["random circuits", s("rect", {x: 0, y: 1, width: 26, height: 12, class: "fi-band"})], ["full model", s("line", {x1: 13, x2: 13, y1: 0, y2: 14, class: "fi-full"})]].filter(Boolean))
    const random = this.trial("AUROC", "random", now.client), draws = random == null ? "" : ` Band: ${t.at(random, "draws")} random circuits, worst to best.`
    return {nodes: [h("p", {class: "fi-word", "data-word": word}, h("b", {text: word}), h("span", {text: ` ${now.cls}, ${now.client}. ${WORDS[word] || ""}`})), card, svg, keys],
      caption: [`Circuit of ${percent(Number(now.size))} of the channels, margin calibrated on other images; n = ${many(t.at(own, "n"))} test images; bars: 95 % intervals.${draws}`, this.note(t)]}
  }

  // ---- D

  wiring() { // the sites with their channels, and the edges, of the chosen circuit
    const {tables} = this.trace, now = this.at, c = tables.channels, e = tables.edges, sites = c.values("site")
    const pick = name => { const w = this.where(c, name, {round: this.roundOf(c, name), cls: now.cls, budget: Number(now.size)}); return w ? c.select(w) : [] }
    const rows = pick(now.client), pinned = now.compare && now.compare !== now.client ? new Set(pick(now.compare).filter(i => c.at(i, "kept")).map(i => `${c.at(i, "site")}:${c.at(i, "channel")}`)) : null
    const kept = new Set(rows.filter(i => c.at(i, "kept")).map(i => `${c.at(i, "site")}:${c.at(i, "channel")}`))
    const w = e && this.where(e, now.client, {round: e.has("round") ? this.roundOf(e) : null, cls: now.cls}), name = (i, a, b) => `${e.at(i, a)}:${e.at(i, b)}`
    let edges = (w ? e.select(w) : []).map(i => ({i, from: name(i, "from_site", "from_channel"), to: name(i, "site", "channel"), v: e.at(i, "value")}))
    const whole = edges.length
    edges = edges.filter(x => kept.has(x.from) && (kept.has(x.to) || x.to.startsWith("logits:")))
    return {c, e, rows, kept, pinned, sites, edges, partial: edges.length < whole || (kept.size && !edges.length)}
  }
  circuit(W, u) {
    const now = this.at, wire = this.wiring(), {c, e, rows, kept, pinned, sites, edges} = wire
    if (!rows.length) return this.missing("channels", now.client)
    this.use("circuit", c, rows)
    if (edges.length) this.use("circuit", e, edges.map(x => x.i))
    const stacked = W < u * 52, wide = stacked ? W : Math.round(W * .66), H = Math.round(u * 25), top = u * 2.2
    const groups = sites.map(site => rows.filter(i => c.at(i, "site") === site)), tall = Math.min(16, Math.max(...groups.map(g => g.length)))
    const columns = groups.map(g => Math.ceil(g.length / tall)), dy = (H - top - u * .6) / tall
    const room = wide - u * 5 - u * 2, dx = Math.min(dy, room * .62 / sum(columns)), space = (room - dx * sum(columns)) / Math.max(sites.length, 1)
    const place = new Map(), r = Math.min(dx, dy) * .36
    let x = u * 1.5
    const heads = []
    groups.forEach((g, k) => {
      heads.push([sites[k], x + dx * columns[k] / 2])
      g.forEach((i, j) => place.set(`${sites[k]}:${c.at(i, "channel")}`, [x + dx * (Math.floor(j / tall) + .5), top + dy * (j % tall + .5)]))
      x += dx * columns[k] + space
    })
    const out = [...new Set(edges.filter(d => d.to.startsWith("logits:")).map(d => d.to))], end = [wide - u * 4.2, top + (H - top) / 2]
    out.forEach(o => place.set(o, end))
    const canvas = h("canvas", {width: Math.round(wide * devicePixelRatio), height: Math.round(H * devicePixelRatio), style: `width:${wide}px;height:${H}px`, role: "img", "aria-label": `channels of the circuit for ${now.cls}: ${kept.size} kept of ${rows.length}`})
    const g = canvas.getContext("2d"), focus = kept.has(now.channel) || pinned?.has(now.channel) ? now.channel : "", most = Math.max(...edges.map(d => d.v), 1e-9)
    g.scale(devicePixelRatio, devicePixelRatio)
    const curve = d => {
      const [a, b] = [place.get(d.from), place.get(d.to)]
      if (!a || !b) return
      const on = focus && (d.from === focus || d.to === focus)
      g.globalAlpha = focus ? (on ? .95 : .05) : .1 + .5 * (d.v / most) ** 1.5
      g.strokeStyle = on ? (d.to === focus ? this.c.green : this.c.blue) : this.c.soft
      g.lineWidth = .4 + 2.8 * d.v / most
      g.beginPath()
      g.moveTo(a[0], a[1])
      g.bezierCurveTo(a[0] + (b[0] - a[0]) * .45, a[1], a[0] + (b[0] - a[0]) * .55, b[1], b[0], b[1])
      g.stroke()
    }
    edges.forEach(curve)
    g.globalAlpha = 1
    for (const [name, [px, py]] of place) {
      const here = kept.has(name), there = pinned?.has(name), output = name.startsWith("logits:")
      g.beginPath()
      g.arc(px, py, here || there || output ? r : r * .42, 0, 7)
      g.fillStyle = output ? this.c.ink : here ? this.c.blue : there ? this.c.paper : this.c.line
      g.fill()
      if (there) { g.lineWidth = Math.max(r * .42, 1.6); g.strokeStyle = this.c.orange; g.stroke() }
      if (name === focus) { g.beginPath(); g.arc(px, py, r + 3.5, 0, 7); g.lineWidth = 2; g.strokeStyle = this.c.ink; g.stroke() }
    }
    g.font = `${u}px system-ui, sans-serif`
    g.fillStyle = this.c.soft
    g.textAlign = "center"
    for (const [site, at] of heads) g.fillText(site, at, u * 1.1)
    if (out.length) { g.fillStyle = this.c.ink; g.fillText(short(now.cls, u * 7, u), end[0] + u * .2, end[1] + r + u * 1.3) }
    const nearby = ev => {
      const box = canvas.getBoundingClientRect(), [mx, my] = [ev.clientX - box.left, ev.clientY - box.top]
      let best = "", far = (dy * .8) ** 2
      for (const [name, [px, py]] of place) { const d = (px - mx) ** 2 + (py - my) ** 2; if (d < far) { far = d; best = name } }
      return best
    }
    const score = new Map(rows.map(i => [`${c.at(i, "site")}:${c.at(i, "channel")}`, c.at(i, "value")]))
    canvas.tipAt = ev => { const n = nearby(ev); return !n ? "" : n.startsWith("logits:") ? `logit of ${now.cls}` : `${n.replace(":", ", channel ")}: ${kept.has(n) ? "kept" : "cut"}${pinned?.has(n) ? `, kept in ${spell(now.compare)}` : ""}; score ${two(score.get(n))}` }
    canvas.addEventListener("click", ev => { const n = nearby(ev); this.set({channel: n === now.channel || n.startsWith("logits:") ? "" : n}) })
    this.placed = {place, kept, sites, pinned}
    const list = (title, found, end) => h("div", {}, h("h4", {text: title}), found.length ? h("ol", {}, found.sort((a, b) => b.v - a.v).slice(0, 12).map(d => h("li", {tabindex: "-1", onclick: () => !d[end].startsWith("logits:") && this.set({channel: d[end]})},
      h("span", {text: d[end].startsWith("logits:") ? `logit of ${now.cls}` : d[end].replace(":", " · ")}), h("i", {style: `width:${(d.v / most * 5).toFixed(2)}em`}), h("span", {class: "fi-num", text: two(d.v)})))) : h("p", {class: "fi-soft", text: "nothing in this circuit"}), found.length > 12 && h("p", {class: "fi-soft", text: `and ${found.length - 12} weaker ones`}))
    const side = h("div", {class: "fi-side"}, focus ? [h("p", {}, h("b", {"data-focus": focus, text: focus.replace(":", ", channel ")}), ` score ${two(score.get(focus))}`), list("reads from", edges.filter(d => d.to === focus), "from"), list("writes to", edges.filter(d => d.from === focus), "to")]
      : [h("p", {class: "fi-soft", text: "Point at a channel; click it, or press Enter and the arrows, to list what it reads and writes."}), h("h4", {text: "strongest connections"}),
        h("ol", {}, [...edges].sort((a, b) => b.v - a.v).slice(0, 8).map(d => h("li", {tabindex: "-1", onclick: () => this.set({channel: d.from})}, h("span", {text: `${d.from.replace(":", " · ")} → ${d.to.startsWith("logits:") ? "logit" : d.to.replace(":", " · ")}`}), h("span", {class: "fi-num", text: two(d.v)}))))])
    const both = pinned ? [...kept].filter(k => pinned.has(k)).length : 0
    const keys = this.legend([[`kept: ${kept.size}`, this.mark(13, 7, 5, "circle", {fill: this.c.blue})], ["cut", s("circle", {cx: 13, cy: 7, r: 2.4, fill: this.c.line})], pinned && pinned.size && [`ring: kept in ${spell(now.compare)} (${both} of ${pinned.size} in both)`, this.mark(13, 7, 5, "circle", {hollow: this.c.orange})]].filter(Boolean))
    const lacks = !e ? " Connections were not computed." : wire.partial ? ` Connections were computed at one size only (${percent(Number(this.trace.meta.sizes[this.trace.meta.sizes.length >> 1]))}): drawn are those among the channels kept here.` : ""
    return {nodes: [h("div", {class: stacked ? "fi-stack" : "fi-row"}, canvas, side), keys], caption: [`${many(rows.length)} channels, ${many(edges.length)} connections of the circuit for ${now.cls}; thickness: strength.${lacks}`, this.note(c)]}
  }
  pinFirst() { const {kept} = this.placed || {}; if (kept?.size && !kept.has(this.get("channel"))) this.set({channel: [...kept][0]}) }
  nextChannel(by, along) { // arrows go through kept channels: up and down inside a site, left and right to the nearest one of the next site
    const {place, kept, sites} = this.placed || {}, now = this.get("channel")
    if (!kept?.size) return
    if (!kept.has(now)) return this.pinFirst()
    const [site] = now.split(/:(?=\d+$)/), of = name => [...kept].filter(k => k.split(/:(?=\d+$)/)[0] === name)
    if (!along) { const list = of(site); return this.set({channel: list[(list.indexOf(now) + by + list.length) % list.length]}) }
    const next = of(sites[sites.indexOf(site) + by]), y = place.get(now)[1]
    if (next.length) this.set({channel: next.reduce((a, b) => Math.abs(place.get(b)[1] - y) < Math.abs(place.get(a)[1] - y) ? b : a)})
  }

  // ---- E

  sizes(W, u) {
    const t = this.trace.tables.circuits, now = this.at, metric = now.metric === "accuracy" ? "AUROC" : now.metric, series = [], keys = []
    const points = (name, of) => {
      const w = this.where(t, name, {round: this.roundOf(t, name), cls: now.cls, ablation: now.ablation || null, metric, of}), rows = w ? t.select(w) : []
      if (rows.length) this.use("sizes", t, rows)
      return rows.map(i => ({x: t.at(i, "share"), v: t.at(i, "value"), lo: t.at(i, "lo"), hi: t.at(i, "hi"), n: t.at(i, "n"), size: t.at(i, "budget"), tip: `${name}, ${of}, ${percent(t.at(i, "share"))} of the channels: ${this.interval(t, i)}`})).sort((a, b) => a.x - b.x)
    }
    const own = points(now.client, "circuit")
    if (!own.length) return this.missing("circuits", now.client)
    const random = points(now.client, "random"), full = points(now.client, "full model"), bare = points(now.client, "untrained")
    series.push({colour: this.c.soft, dash: "6 4", thin: true, ribbon: .3, wide: u * .9, points: random}, {colour: this.c.ink, dash: "2 3", thin: true, points: full.map(p => ({...p, lo: NaN}))})
    if (bare.length) series.push({colour: this.c.soft, shape: "diamond", hollow: true, loose: true, points: bare})
    const beside = this.shown()[1] ? points(now.compare, "circuit") : []
    if (beside.length) series.push({colour: this.c.orange, shape: "diamond", points: beside})
    series.push({colour: this.c.blue, points: own})
    const line = (colour, dash) => s("line", {x1: 0, x2: 26, y1: 7, y2: 7, stroke: colour, "stroke-width": 2.4, "stroke-dasharray": dash})
    keys.push([now.client, line(this.c.blue), this.mark(13, 7, 4, "circle", {fill: this.c.blue})], beside.length && [spell(now.compare), line(this.c.orange), this.mark(13, 7, 4, "diamond", {fill: this.c.orange})], ["full model", line(this.c.ink, "2 3")],
      ["random circuits", s("rect", {x: 0, y: 1, width: 26, height: 12, class: "fi-band"}), line(this.c.soft, "6 4")], bare.length && ["circuit of an untrained network", this.mark(13, 7, 4, "diamond", {hollow: this.c.soft})])
    const every = series.flatMap(l => l.points.flatMap(p => [p.v, p.lo, p.hi])).filter(Number.isFinite), low = Math.floor(Math.min(...every, metric === "AUROC" ? .5 : 0) * 5) / 5
    const shares = [...new Set(series.flatMap(l => l.points.map(p => p.x)))].sort((a, b) => a - b), pad = Math.max((Math.max(...shares) - Math.min(...shares)) * .08, .02), chosen = own.find(p => p.size === now.size)
    const near = v => own.reduce((a, b) => Math.abs(b.x - v) < Math.abs(a.x - v) ? b : a)
    return {nodes: [this.plot(W, u * 20, u, {x: [Math.max(Math.min(...shares) - pad, 0), Math.min(Math.max(...shares) + pad, 1)], y: [low, 1], series, cursor: chosen?.x, form: two, xform: percent, ticks: shares, xlabel: "share of the channels kept",
      ylabel: `${METRICS[metric]}, ${now.cls}`, pick: v => this.set({size: near(v).size}), label: `${metric} over the size of the circuit`}), this.legend(keys.filter(Boolean))],
      caption: [`n = ${many(own[0].n)} test images; bars: 95 % intervals; band: random circuits of each size, worst to best. Click to choose a size.`, this.note(t)]}
  }

  // ---- F

  images(W, u) {
    const t = this.trace.tables.answers, now = this.at, {pictures} = this.trace
    let size = now.size
    this.lit.disabled = true
    const rowsOf = (name, of, budget) => { const w = this.where(t, name, {round: this.roundOf(t, name), cls: now.cls, of, ...(of === "circuit" ? {budget, ablation: now.ablation || null} : {})}); return w ? t.select(w) : [] }
    const own = rowsOf(now.client, "circuit", size).length ? rowsOf(now.client, "circuit", size) : this.trace.meta.sizes.flatMap(b => { const rows = rowsOf(now.client, "circuit", b); if (rows.length) size = b; return rows.length ? [rows] : [] }).pop() || []
    if (!own.length) return this.missing("answers", now.client)
    const says = rows => new Map(rows.map(i => [t.at(i, "image"), t.at(i, "value")])), beside = now.compare && now.compare !== now.client ? rowsOf(now.compare, "circuit", size) : []
    const full = says(rowsOf(now.client, "full model", null)), other = says(beside), mine = new Map(own.map(i => [t.at(i, "image"), i]))
    this.use("images", t, own)
    if (beside.length) this.use("images", t, beside)
    const value = i => t.at(i, "value"), is = i => t.at(i, "truth") === now.cls, yes = i => value(i) > 0
    const kinds = [["hits", own.filter(i => is(i) && yes(i)).sort((a, b) => value(b) - value(a)), own.filter(is).length], ["misses", own.filter(i => is(i) && !yes(i)).sort((a, b) => value(a) - value(b)), own.filter(is).length],
      ["false alarms", own.filter(i => !is(i) && yes(i)).sort((a, b) => value(b) - value(a)), own.filter(i => !is(i)).length]]
    const differs = i => other.has(t.at(i, "image")) && (other.get(t.at(i, "image")) > 0) !== yes(i)
    const stacked = W < u * 52, wide = stacked ? W : W * .7, fit = Math.max(Math.floor(wide / ((u > 16 ? 3.15 : 3.95) * u)), 1)
    const tip = i => { const k = t.at(i, "image"); return `image ${k}, ${t.at(i, "truth")}: margin ${two(value(i))}` + (full.has(k) ? `; full model ${two(full.get(k))}` : "") + (other.has(k) ? `; ${spell(now.compare)} ${two(other.get(k))}` : "") }
    const groups = kinds.map(([name, rows, of], g) => {
      const most = this.whole.has(name) ? rows.length : fit * (g ? 1 : 2), left = rows.length - most
      const thumb = i => { const node = this.thumb(t.at(i, "image"), tip(i), u); node.classList.add("fi-answer"); if (differs(i)) node.classList.add("fi-differs"); return node }
      return h("div", {class: "fi-answers", "data-kind": name}, h("h4", {}, h("span", {text: name}), ` ${many(rows.length)} of ${many(of)} ${g === 2 ? "other images" : "images of "}`, g === 2 ? null : h("bdi", {text: now.cls}), of ? ` (${percent(rows.length / of)})` : ""),
        h("div", {class: "fi-thumbs"}, rows.slice(0, most).map(thumb), rows.length ? null : h("em", {class: "fi-soft", text: "none"}), (left > 0 || this.whole.has(name)) && h("button", {type: "button", "data-do": `more ${name}`, text: left > 0 ? `and ${many(left)} more` : "fewer", onclick: () => { this.whole.has(name) ? this.whole.delete(name) : this.whole.add(name); this.redo("images") }})))
    })
    const many_ = other.size ? own.filter(differs).length : 0
    const keys = other.size ? this.legend([[`the circuit of ${spell(now.compare)} says otherwise (${many(many_)} of ${many(own.filter(i => other.has(t.at(i, "image"))).length)} images)`, s("rect", {x: 5, y: 1, width: 14, height: 12, fill: "none", stroke: this.c.orange, "stroke-width": 2, "stroke-dasharray": "4 2"})]]) : null
    const card = this.imageCard(mine.get(now.image), {t, full, other}, u)
    return {nodes: [h("div", {class: stacked ? "fi-stack" : "fi-row"}, h("div", {style: `width:${Math.floor(wide)}px`, class: "fi-mapside"}, groups, keys), h("div", {class: "fi-side"}, card))],
      caption: [`What the circuit of ${percent(Number(size))} of the channels says of ${many(own.length)} test images, by its calibrated margin; most certain first${pictures ? "" : "; pictures were not recorded"}.${size !== now.size ? ` Of this size, the only one recorded for ${now.client}.` : ""}`, this.note(t)]}
  }
  nextImage(by) { // arrows go through the pictures that are drawn
    const drawn = [...this.panels.images.body.querySelectorAll(".fi-answer")].map(n => Number(n.dataset.image)), at = drawn.indexOf(this.at.image)
    if (drawn.length) this.set({image: drawn[at < 0 ? (by > 0 ? 0 : drawn.length - 1) : clamp(at + by, 0, drawn.length - 1)]})
  }
  imageCard(i, {t, full, other}, u) { // the chosen image, and which of its pixels carry the margin
    const now = this.at
    this.lit.disabled = i == null
    if (i == null) return h("p", {class: "fi-soft", text: now.image >= 0 ? `Image ${now.image} is not among those that were recorded here.` : "Click an image, or use the arrows, to see what each model says of it, and which pixels carry it."})
    const k = t.at(i, "image"), line = (name, v, data) => v == null ? null : h("tr", {}, h("th", {scope: "row", text: name}), h("td", {"data-margin": data, text: two(v)}), h("td", {text: v > 0 ? `says ${now.cls}` : `says not ${now.cls}`}))
    const answer = this.lit_ && this.lit_.image === k && this.lit_.cls === now.cls && this.lit_.run === this.of(now.client).run && this.lit_.client === this.of(now.client).client && this.lit_.round === (this.roundOf(t) ?? now.round) ? this.replies.get(JSON.stringify(this.lit_)) : null
    const waits = this.pending?.panel === "images", signed = this.lit_?.method !== "saliency"
    return [h("div", {class: "fi-chosenimage"}, h("div", {class: "fi-large"}, this.thumb(k, `image ${k}`, u)), answer?.map && h("div", {class: "fi-large"}, this.heat(k, answer, "map"), h("span", {class: "fi-soft", text: MAPS[this.lit_.method]})), answer?.control && h("div", {class: "fi-large"}, this.heat(k, answer, "control"), h("span", {class: "fi-soft", text: "control: weights drawn anew"}))),
      h("p", {}, h("b", {"data-image-card": k, text: `image ${k}`}), `, ${t.at(i, "truth")}`), h("table", {class: "fi-mini"}, h("caption", {text: `margin of ${now.cls}, calibrated`}), line("circuit", t.at(i, "value"), "circuit"), line("full model", full.get(k), "full"), other.size ? line(`circuit of ${spell(now.compare)}`, other.get(k), "beside") : null),
      waits && h("p", {class: "fi-soft", text: "the kernel computes …"}), answer?.error && h("p", {class: "fi-note", text: answer.error}),
      answer?.map && h("p", {class: "fi-soft", "data-attributed": k, text: `${signed ? `Of the full model's margin: blue speaks for ${now.cls}, orange against.` : `The bluer, the more the full model's margin of ${now.cls} reacts to the pixel, for or against.`}${answer.completeness == null ? "" : ` The map's sum is off the change in the margin by ${percent1(answer.completeness)}.`} Rank correlation with the map of the same network, its weights drawn anew: ${two(answer.correlation)}${Math.abs(answer.correlation) > .5 ? "; much of the map does not come from training" : ""}.`})]
  }
  heat(image, answer, which) { // a signed map over its picture
    const values = answer[which].flat(), [H, W] = answer.shape, p = this.trace.pictures, most = Math.max(...values.map(Math.abs), 1e-12), canvas = h("canvas", {width: W, height: H, class: "fi-thumb fi-heat", role: "img", "aria-label": `${which} of image ${image}`}), g = canvas.getContext("2d"), pixels = g.createImageData(W, H)
    const [blue, orange] = [[0, 114, 178], [213, 94, 0]], same = p && p.shape[1] === H && p.shape[2] === W && image < p.shape[0], C = same ? p.shape[3] || 1 : 1
    for (let i = 0; i < H * W; i++) {
      const grey = same ? 150 + .38 * p.data[(image * H * W + i) * C] : 245, v = values[i] / most, a = Math.sqrt(Math.abs(v)), ink = v > 0 ? blue : orange
      for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = grey + (ink[c] - grey) * a
      pixels.data[4 * i + 3] = 255
    }
    g.putImageData(pixels, 0, 0)
    return canvas
  }

  // ---- G

  concepts(W, u) {
    const {tables, pictures} = this.trace, t = tables.concepts, map = tables.map, now = this.at, side = this.of(now.client).name === "reference" ? "reference" : "run", m = map && (map.values("metric").includes("umap") ? "umap" : map.values("metric")[0])
    const spots = map ? map.select({metric: m}) : [], fire = k => t.select({run: side, cls: now.cls, concept: k, metric: "activation"})[0]
    const strength = spots.map(i => { const r = fire(map.at(i, "concept")); return r == null ? 0 : t.at(r, "value") }), top = Math.max(...strength, 1e-9)
    this.order = spots.map((i, j) => [map.at(i, "concept"), strength[j]]).filter(([k]) => !this.brushed || this.brushed.has(k)).sort((a, b) => b[1] - a[1]).map(([k]) => k)
    const chosen = now.concept >= 0 && t.select({concept: now.concept}).length ? now.concept : this.order[0] ?? -1
    this.concept = chosen
    const stacked = W < u * 52, wide = stacked ? W : Math.round(W * .4), H = Math.round(Math.min(wide * .78, u * 27)), pad = u
    const nodes = []
    if (spots.length) {
      this.use("concepts", map, spots)
      const range = c => spots.reduce(([a, b], i) => [Math.min(a, map.at(i, c)), Math.max(b, map.at(i, c))], [Infinity, -Infinity]), [x, y] = [range("x"), range("y")]
      const X = v => pad + (v - x[0]) / (x[1] - x[0] || 1) * (wide - 2 * pad), Y = v => H - pad - (v - y[0]) / (y[1] - y[0] || 1) * (H - 2 * pad)
      const canvas = h("canvas", {class: "fi-map", width: Math.round(wide * devicePixelRatio), height: Math.round(H * devicePixelRatio), style: `width:${wide}px;height:${H}px`, role: "img", "aria-label": `map of ${spots.length} concepts; lighter: fires more for ${now.cls}`})
      const g = canvas.getContext("2d"), at = spots.map((i, j) => [X(map.at(i, "x")), Y(map.at(i, "y")), map.at(i, "concept"), strength[j]]).sort((a, b) => a[3] - b[3])
      g.scale(devicePixelRatio, devicePixelRatio)
      const r = clamp(Math.sqrt(wide * H / at.length) * .16, 2, u * .5)
      for (const [px, py, k, v] of at) {
        g.globalAlpha = this.brushed && !this.brushed.has(k) ? .12 : .9
        g.fillStyle = v <= 0 ? this.c.line : viridis(this.c.dark ? .12 + .88 * Math.sqrt(v / top) : .95 - .95 * Math.sqrt(v / top))
        g.beginPath()
        g.arc(px, py, r, 0, 7)
        g.fill()
        if (k === chosen) { g.globalAlpha = 1; g.lineWidth = 2.5; g.strokeStyle = this.c.orange; g.beginPath(); g.arc(px, py, r + 4, 0, 7); g.stroke() }
      }
      const nearby = ev => { const b = canvas.getBoundingClientRect(), mx = ev.clientX - b.left, my = ev.clientY - b.top; let best = null, far = 14 ** 2; for (const p of at) { const d = (p[0] - mx) ** 2 + (p[1] - my) ** 2; if (d < far) { far = d; best = p } } return best }
      canvas.tipAt = ev => { const p = nearby(ev); return p ? `concept ${p[2]}: mean activation ${two(p[3])} for ${now.cls}` : "" }
      const box = h("div", {class: "fi-brush", hidden: true})
      let from = null
      canvas.addEventListener("pointerdown", ev => { const b = canvas.getBoundingClientRect(); from = [ev.clientX - b.left, ev.clientY - b.top]; canvas.setPointerCapture(ev.pointerId) })
      canvas.addEventListener("pointermove", ev => {
        if (!from) return
        const b = canvas.getBoundingClientRect(), to = [ev.clientX - b.left, ev.clientY - b.top], [l, t0] = [0, 1].map(i => Math.min(from[i], to[i])), [w, h0] = [0, 1].map(i => Math.abs(from[i] - to[i]))
        box.hidden = w + h0 < 8
        Object.assign(box.style, {left: `${l}px`, top: `${t0}px`, width: `${w}px`, height: `${h0}px`})
      })
      canvas.addEventListener("pointercancel", () => { from = null; box.hidden = true })
      canvas.addEventListener("pointerup", ev => {
        const b = canvas.getBoundingClientRect(), to = [ev.clientX - b.left, ev.clientY - b.top], [l, t0] = [0, 1].map(i => Math.min(from[i], to[i])), [rt, bt] = [0, 1].map(i => Math.max(from[i], to[i]))
        if (rt - l + bt - t0 < 8) { const p = nearby(ev); from = null; if (p) this.set({concept: p[2], image: -1}); return }
        from = null
        const inside = at.filter(p => p[0] >= l && p[0] <= rt && p[1] >= t0 && p[1] <= bt)
        this.brushed = inside.length ? new Set(inside.map(p => p[2])) : null
        this.drawn = null
        this.set({concept: inside.length ? inside.reduce((a, c) => c[3] > a[3] ? c : a)[2] : chosen})
      })
      const found = h("input", {type: "search", "data-do": "find", inputmode: "numeric", placeholder: "number", size: 6, "aria-label": "search a concept by its number", onchange: ev => { const text = ev.target.value.trim(), k = Number(text); if (text !== "" && t.select({concept: k}).length) this.set({concept: k, image: -1}); else if (text !== "") { ev.target.setCustomValidity(`There is no concept ${text}.`); ev.target.reportValidity() } }, oninput: ev => ev.target.setCustomValidity("")})
      nodes.push(h("div", {class: "fi-mapside", style: `width:${wide}px`}, h("p", {class: "fi-axis", text: `${spots.length} concepts by direction (${m}); ${this.c.dark ? "lighter" : "darker"}: fires more for ${now.cls}`}), h("div", {class: "fi-over"}, canvas, box),
        h("p", {class: "fi-pickers"}, h("button", {type: "button", "data-do": "previous", text: "‹", "aria-label": "previous concept", onclick: () => this.nextConcept(-1)}), h("button", {type: "button", "data-do": "next", text: "›", "aria-label": "next concept", onclick: () => this.nextConcept(1)}),
          h("label", {}, "find ", found), this.brushed ? h("button", {type: "button", "data-do": "clear", text: `${this.brushed.size} brushed: clear`, onclick: () => { this.brushed = null; this.drawn = null; this.later() }}) : h("span", {class: "fi-soft", text: "drag to brush"}))))
    }
    const big = u > 16 && !stacked, card = chosen >= 0 ? this.card(chosen, u, big || stacked ? W : W - wide - u * 2) : null
    if (card) nodes.push(h("div", {class: "fi-card"}, card.facts, !big && card.bars))
    if (nodes.length) nodes[big ? nodes.length - 1 : 0].append(...this.rebuilt()) // where there is room
    const images = this.trace.tables.gallery ? ` Pictures: ${pictures ? "test images by their number" : "not recorded"}.` : ""
    return {nodes: [h("div", {class: stacked ? "fi-stack" : "fi-row"}, nodes), ...(big && card ? card.bars : [])], caption: `One dictionary of ${many(new Set(t.values("concept")).size)} concepts for run and reference; ${side === "run" ? "the run's" : "the reference's"} activations colour the map.${images}`}
  }
  rebuilt() { // what the dictionary rebuilds of one model from the other, between its floor and its ceiling
    const d = this.trace.tables.dictionary
    if (!d) return []
    const top = d.values("of").includes("another seed") ? "another seed" : "copy"
    const rows = [["floor: untrained → reference", "untrained", "untrained", "reference"], ["run → reference", "models", "run", "reference"], ["reference → run", "models", "reference", "run"], [`ceiling: ${top} → reference`, top, top, "reference"]]
      .map(([name, of, a, b]) => [name, d.select({metric: "R2", of, a, b})[0]]).filter(([, i]) => i != null)
    if (!rows.length) return []
    this.use("concepts", d, rows.map(([, i]) => i))
    return [h("table", {class: "fi-mini"}, h("caption", {text: `Rebuilt by the dictionary (R², n = ${many(d.at(rows[0][1], "n"))})`}), rows.map(([name, i]) => h("tr", {class: /^(floor|ceiling)/.test(name) ? "fi-soft" : ""}, h("th", {scope: "row", text: name}), h("td", {text: `${d.at(i, "value").toFixed(3)} [${d.at(i, "lo").toFixed(3)}, ${d.at(i, "hi").toFixed(3)}]`}))))]
  }
  card(k, u, room) {
    const {tables, meta, pictures} = this.trace, t = tables.concepts, gallery = tables.gallery, now = this.at, used = []
    const look = (run, metric, cls) => t.select({run, metric, cls, concept: k})[0], value = (run, metric, cls = "all") => { const i = look(run, metric, cls); if (i == null) return NaN; used.push(i); return t.at(i, "value") }
    const strips = []
    for (const kind of ["top", "quantile"]) for (const run of ["run", "reference"]) {
      const rows = gallery ? gallery.select({run, concept: k, metric: kind}).sort((a, b) => kind === "top" ? gallery.at(a, "rank") - gallery.at(b, "rank") : gallery.at(b, "rank") - gallery.at(a, "rank")) : []
      if (rows.length) this.use("concepts", gallery, rows)
      const thumbs = rows.map(i => this.thumb(gallery.at(i, "image"), `image ${gallery.at(i, "image")}: activation ${two(gallery.at(i, "value"))}${kind === "quantile" ? `, at ${percent(gallery.at(i, "rank"))} of the range` : ""}`, u))
      strips.push(h("div", {class: "fi-strip", "data-run": run, "data-kind": kind}, h("span", {text: run}), h("span", {}, thumbs.length ? thumbs : h("em", {class: "fi-soft", text: "never fires"}))))
    }
    const bars = (metric, title) => {
      const strength = c => Math.max(...["run", "reference"].map(run => { const i = look(run, metric, c); return i == null ? 0 : Math.abs(t.at(i, "value")) }))
      const classes = meta.classes.length > LONG ? [...meta.classes].sort((a, b) => strength(b) - strength(a)).slice(0, 15) : meta.classes
      if (classes !== meta.classes) title += ", the 15 strongest"
      const both = ["run", "reference"].map(run => classes.map(c => value(run, metric, c))), most = Math.max(...both.flat().map(Math.abs).filter(Number.isFinite), 1e-9), signed = metric === "effect"
      const row = u * 1.5, left = Math.min(Math.max(...classes.map(c => width(c, u * .9, "bold"))) + u * .6, room * .28), W = room < u * 34 ? room - 2 : Math.min(room / 2 - u, u * 26), wide = W - left - u * .5, zero = signed ? left + wide / 2 : left, scale = (signed ? wide / 2 : wide) / most
      const nodes = classes.flatMap((c, j) => [s("text", {x: left - u * .4, y: row * (j + .5), "text-anchor": "end", "dominant-baseline": "central", class: c === now.cls ? "fi-on fi-small" : "fi-small", text: short(c, left - u * .4, u * .9)}),
        ...both.map((v, b) => Number.isFinite(v[j]) && s("rect", {x: Math.min(zero, zero + v[j] * scale), width: Math.abs(v[j] * scale), y: row * (j + .5) + (b ? .04 : -.44) * u, height: u * .4, fill: b ? this.c.orange : this.c.blue, "data-tip": `${c}, ${b ? "reference" : "run"}: ${two(v[j])}`}))].filter(Boolean))
      return h("figure", {}, h("figcaption", {text: title}), s("svg", {width: W, height: row * classes.length + 4, role: "img", "aria-label": title}, s("line", {x1: zero, x2: zero, y1: 0, y2: row * classes.length, class: "fi-rule"}), nodes))
    }
    const figures = h("div", {class: "fi-row fi-bars"}, bars("activation", "mean activation, by class"), bars("effect", "effect on the logits"))
    const extra = ["correlation", "IoU", "entropy"].map(m => [m, value("all", m)]).filter(([, v]) => Number.isFinite(v)).map(([m, v]) => `${m} ${two(v)}`).join(" · ")
    const chosen = now.image >= 0 && gallery ? [...new Set(gallery.select({image: now.image}).filter(i => gallery.at(i, "metric") === "top").map(i => gallery.at(i, "concept")))] : []
    const facts = [h("p", {}, h("b", {"data-concept": k, text: `concept ${k}`}), ` fires in ${percent1(value("run", "rate"))} of the run's rows, ${percent1(value("reference", "rate"))} of the reference's${extra ? ` · ${extra}` : ""}`),
      h("h4", {text: "fires most in"}), strips.slice(0, 2), h("h4", {text: "at the quantiles of its activation"}), strips.slice(2),
      now.image >= 0 && h("p", {class: "fi-also"}, `image ${now.image} is also on top in `, chosen.filter(x => x !== k).slice(0, 12).map(x => h("button", {type: "button", text: String(x), onclick: () => this.set({concept: x})})), chosen.length > 1 ? "" : "no other concept")]
    this.use("concepts", t, used)
    return {facts, bars: [this.legend([["run", s("rect", {x: 4, y: 3, width: 18, height: 8, fill: this.c.blue})], ["reference", s("rect", {x: 4, y: 3, width: 18, height: 8, fill: this.c.orange})]]), figures]}
  }
  thumb(image, tip, u) {
    const p = this.trace.pictures
    const on = this.get("image") === image, about = {"data-image": image, "data-tip": tip, role: "img", "aria-label": tip, onclick: () => this.set({image: on ? -1 : image})}
    if (!p || image >= p.shape[0]) return h("span", {...about, class: on ? "fi-number fi-picked" : "fi-number", text: `#${image}`})
    const [, H, W, C = 1] = p.shape, canvas = h("canvas", {...about, width: W, height: H, class: on ? "fi-thumb fi-picked" : "fi-thumb"})
    const g = canvas.getContext("2d"), pixels = g.createImageData(W, H), from = image * H * W * C
    for (let i = 0; i < H * W; i++) { for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = p.data[from + i * C + (C === 3 ? c : 0)]; pixels.data[4 * i + 3] = 255 }
    g.putImageData(pixels, 0, 0)
    return canvas
  }
  nextConcept(by) { if (!this.order?.length) return; const at = this.order.indexOf(this.concept); this.set({concept: this.order[clamp(at + by, 0, this.order.length - 1)], image: -1}) }

  // ---- H

  head(W, u) {
    if (this.trace.meta.classes.length > LONG) W -= 18 // a scroll bar
    const t = this.trace.tables.heads, now = this.at, {classes} = this.trace.meta, looks = {native: ["native head", this.c.soft, "circle", true], "bias only": ["biases", this.c.blue, "circle", true], "scale + bias": ["scales, biases", this.c.pink, "diamond", true], head: ["head", this.c.blue, "circle", false], "full fine-tune": ["whole model", this.c.orange, "diamond", false]}
    const steps = Object.keys(looks).filter(m => t.values("metric").includes(m)), at = name => this.where(t, name, {round: this.roundOf(t, name)})
    const of = name => { const w = name && at(name); return (cls, metric) => w ? t.select({...w, cls, metric})[0] : undefined }
    const own = of(now.client), beside = this.shown()[1] && of(this.shown()[1]), pinned = beside && beside("all", "native") != null ? this.shown()[1] : "", live = this.refitted()
    if (own("all", "native") == null && !live) return this.missing("heads", now.client)
    const names = ["all", ...classes], left = Math.min(Math.max(...names.map(c => width(c, u, "bold")), pinned ? width(spell(pinned), u * .9) : 0) + u, W * .3), wide = c => c === "all" || c === now.cls // rows with intervals are higher
    const lane = (steps.length + (live ? 1 : 0)) * u * .74 + u * .5, high = c => wide(c) ? lane * (pinned ? 2 : 1) : u * 1.75
    const top = u * .3, X = v => left + v * (W - left - u * 1.6), H = top + sum(names.map(high)) + u * 1.7, nodes = [], rows = []
    for (const v of [0, .25, .5, .75, 1]) nodes.push(s("line", {x1: X(v), x2: X(v), y1: top, y2: H - u * 1.7, class: "fi-rule"}), s("text", {x: X(v), y: H - u * .4, "text-anchor": "middle", class: "fi-soft", text: percent(v)}))
    const cell = i => ({value: t.at(i, "value"), lo: t.at(i, "lo"), hi: t.at(i, "hi"), n: t.at(i, "n")}), said = f => `${percent(f.value)} [${percent(f.lo)}, ${percent(f.hi)}]`
    const figures = (get, cls) => steps.map(m => { const i = get(cls, m); if (i != null) rows.push(i); return i == null ? null : [looks[m], m, cell(i)] }).filter(f => f && Number.isFinite(f[2].value))
    const draw = (group, found, y, spread, tip, faint) => found.forEach(([[, colour, shape, hollow], metric, f], k) => {
      const at = spread ? y + (k - (found.length - 1) / 2) * u * .74 : y, mark = this.mark(X(f.value), at, u * .32, shape, hollow ? {hollow: colour} : {fill: colour})
      mark.dataset.tip = `${tip}, ${metric}: ${said(f)}`
      if (faint) mark.setAttribute("opacity", ".6")
      if (spread && Number.isFinite(f.lo) && Number.isFinite(f.hi)) group.append(s("line", {x1: X(f.lo), x2: X(f.hi), y1: at, y2: at, stroke: colour, "stroke-width": 2, opacity: faint ? .6 : 1}))
      group.append(mark)
    })
    let below = top
    for (const c of names) {
      const row = high(c), y = below + row / 2, on = c === now.cls, found = figures(own, c), values = found.map(([, , f]) => f.value)
      const fresh = live?.rows.find(r => r.cls === c && r.metric === live.how)
      if (fresh && fresh.value != null) found.push([["", this.c.green, "diamond", false], `live: ${live.how}`, {...fresh, lo: fresh.lo ?? NaN, hi: fresh.hi ?? NaN}])
      below += row
      const group = s("g", {class: c === "all" ? "" : "fi-hit", "data-cls": c, onclick: () => c !== "all" && this.set({cls: c})}, s("rect", {x: 0, y: y - row / 2, width: W, height: row, rx: 3, class: on ? "fi-rowon" : "fi-rowoff"}),
        s("text", {x: left - u * .6, y: pinned && wide(c) ? y - row / 4 : y, "text-anchor": "end", "dominant-baseline": "central", class: on ? "fi-on" : "", text: short(c, left - u, u)}), !wide(c) && values.length && s("line", {x1: X(Math.min(...values)), x2: X(Math.max(...values)), y1: y, y2: y, class: "fi-mid"}))
      draw(group, found, pinned && wide(c) ? y - row / 4 : y, wide(c), c, false)
      if (pinned && wide(c)) {
        group.append(s("text", {x: left - u * .6, y: y + row / 4, "text-anchor": "end", "dominant-baseline": "central", class: "fi-small fi-soft", text: short(spell(pinned), left - u, u * .9)}))
        draw(group, figures(beside, c), y + row / 4, true, `${c}, ${spell(pinned)}`, true)
      }
      nodes.push(group)
    }
    this.use("head", t, rows)
    const labels = t.has("samples") && rows.length ? Math.max(...rows.map(i => t.at(i, "samples"))) : 0, key = ([words, colour, shape, hollow]) => [words, this.mark(13, 7, 4.6, shape, hollow ? {hollow: colour} : {fill: colour})]
    return {nodes: [h("div", {class: "fi-scroll"}, s("svg", {width: W, height: H, role: "img", "aria-label": `accuracy before and after refitting, ${now.client}`}, nodes)), this.legend([...steps.map(m => key(looks[m])), ...(live ? [key([`live: ${live.how}, ${many(live.labels)} labels`, this.c.green, "diamond", false])] : [])])],
      caption: [`Accuracy of ${this.label(now.client)}${rows.length ? `; n = ${many(t.at(rows[0], "n"))} test images` : ""}${labels ? `, refitted on ${labels} labels${t.has("draws") ? `, ${Math.max(...rows.map(i => t.at(i, "draws")))} draws` : ""}` : ""}; bars for all and the chosen class: 95 % intervals.`, rows.length ? this.note(t) : null, live && live.round !== this.roundOf(t) ? ` Live: round ${live.round}.` : null]}
  }
  refitted() { // the live head, if one was asked for and answered; the last one stays while the next is on its way
    const q = this.live_, answer = q && this.replies.get(JSON.stringify(q)), {took} = this.readings
    if (answer?.rows) this.last = {...q, rows: answer.rows, seconds: answer.seconds}
    const same = q && this.last && ["run", "client", "round"].every(k => this.last[k] === q[k])
    took.textContent = !q ? "" : answer?.error ? answer.error : answer?.rows ? `live, ${answer.seconds.toFixed(2)} s` : "refitting …"
    took.dataset.word = !q ? "" : answer?.error ? "error" : answer?.rows ? "live" : "busy"
    return same && !answer?.error ? this.last : null
  }

  // -------------------------------------------------------------- rows

  plotted(name) { // exactly the rows that a panel draws: columns, and values in full precision
    const parts = this.used[name] || [], several = new Set(parts.map(([t]) => t.name)).size > 1, columns = [...(several ? ["table"] : []), ...new Set(parts.flatMap(([t]) => t.columns))], rows = []
    const seen = new Set()
    for (const [t, list] of parts) for (const i of list) {
      if (seen.has(`${t.name} ${i}`)) continue
      seen.add(`${t.name} ${i}`)
      rows.push(columns.map(c => c === "table" && several ? t.name : t.has(c) ? t.at(i, c) : ""))
    }
    return {columns, rows}
  }
  toggle(name) {
    const p = this.panels[name], show = p.rows.hidden
    p.rows.hidden = !show
    p.node.querySelector("[data-do=table]").setAttribute("aria-expanded", String(show))
    show ? this.open.add(name) : this.open.delete(name)
    if (show) this.fillRows(name)
  }
  fillRows(name, most = 200) {
    const {columns, rows} = this.plotted(name), cell = v => v == null || Number.isNaN(v) ? "" : typeof v === "number" && !Number.isInteger(v) ? v.toPrecision(4) : String(v)
    const keep = columns.map((_, j) => j).filter(j => rows.some(r => cell(r[j]) !== ""))
    this.panels[name].rows.replaceChildren(h("table", {}, h("caption", {text: `${many(rows.length)} rows${rows.length > most ? `, the first ${most} shown; CSV has all` : ""}`}), h("thead", {}, h("tr", {}, keep.map(j => h("th", {scope: "col", text: columns[j]})))),
      h("tbody", {}, rows.slice(0, most).map(r => h("tr", {}, keep.map(j => h("td", {text: cell(r[j])})))))))
  }
  code(name) { // Python that makes the same view, and the same figure for paper
    const python = v => typeof v === "number" ? String(v) : `'${JSON.stringify(v).slice(1, -1).replaceAll("'", "\\'")}'`, given = this.trace.meta.given || "found" // JSON's escapes are Python's too
    const opens = given.includes("Run.open(") ? "from fedinterp.run import Run\n" : ""
    const call = `ex = Explorer(${given}, state=State(${STATE.map(k => `${k}=${python(this.at[k])}`).join(", ")}))`
    return `from fedinterp.explorer import Explorer, State\n${opens}${call}\nex.figure(${python(name)})  # an Altair chart; ex.code(${python(name)}) is the call behind it`
  }
  toggleCode(name) {
    const p = this.panels[name]
    p.code.hidden = !p.code.hidden
    p.node.querySelector("[data-do=code]").setAttribute("aria-expanded", String(!p.code.hidden))
    if (!p.code.hidden) p.code.textContent = this.code(name)
  }
  csv(name) {
    const {columns, rows} = this.plotted(name), quote = v => { const text = v == null || Number.isNaN(v) ? "" : String(v); return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text }
    return [columns, ...rows].map(r => r.map(quote).join(",")).join("\r\n") + "\r\n"
  }
  save(name) { this.download(new Blob([this.csv(name)], {type: "text/csv"}), `${name}-${this.at.client}-${this.at.cls}.csv`) }
  download(blob, name) {
    const link = h("a", {href: URL.createObjectURL(blob), download: name.replace(/[^\p{L}\p{N}.-]+/gu, "_")})
    link.click()
    setTimeout(() => URL.revokeObjectURL(link.href), 1000)
  }
  album() { // the pictures that are drawn, under their headings
    const groups = [...this.panels.images.body.querySelectorAll(".fi-answers")].map(g => [g.querySelector("h4").textContent, [...g.querySelectorAll("canvas")]]), side = 56
    const most = Math.max(...groups.map(([, thumbs]) => thumbs.length), 8), canvas = h("canvas", {width: most * (side + 4) + 20, height: groups.length * 92 + 12}), g = canvas.getContext("2d")
    const paint = (colour, ...box) => { g.fillStyle = colour; if (box.length) g.fillRect(...box) }
    paint(this.c.paper, 0, 0, canvas.width, canvas.height)
    Object.assign(g, {imageSmoothingEnabled: false, font: "14px system-ui, sans-serif"})
    groups.forEach(([heading, thumbs], k) => { paint(this.c.ink); g.fillText(heading, 10, k * 92 + 26); thumbs.forEach((t, j) => g.drawImage(t, 10 + j * (side + 4), k * 92 + 34, side, side)) })
    return canvas
  }
  picture(name) { // the panel's first drawing, by itself: an SVG with its looks written into it, or the pixels of a canvas
    const body = this.panels[name].body, file = `${name}-${this.at.client}-${this.at.cls}`, canvas = name === "images" ? this.album() : body.querySelector("canvas[role=img]:not(.fi-thumb)"), svg = body.querySelector("svg[role=img]")
    if (canvas) return canvas.toBlob(blob => this.download(blob, `${file}.png`))
    if (!svg) return
    const copy = svg.cloneNode(true), looks = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight", "font-family"], from = [svg, ...svg.querySelectorAll("*")]
    for (const [i, node] of [copy, ...copy.querySelectorAll("*")].entries()) { const look = getComputedStyle(from[i]); for (const k of looks) if (look[k]) node.setAttribute(k, look.getPropertyValue(k)); node.removeAttribute("class"); node.removeAttribute("style") }
    copy.setAttribute("xmlns", SVG)
    copy.prepend(s("rect", {width: "100%", height: "100%", fill: this.c.paper}))
    this.download(new Blob([new XMLSerializer().serializeToString(copy)], {type: "image/svg+xml"}), `${file}.svg`)
  }
}

const nearest = (list, v) => list.reduce((a, b) => Math.abs(b - v) < Math.abs(a - v) ? b : a, list[0])
const percent1 = v => Number.isFinite(v) ? `${(v * 100).toFixed(v < .1 ? 1 : 0)} %` : "–"

function render({model, el}) {
  const view = new View(model, el)
  return () => view.close()
}
export default {render}
