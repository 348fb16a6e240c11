// Stands in for a kernel: what a widget's model does, over values that are in the page and the link.

class Model {
  constructor(values, kept) { Object.assign(this, {values, kept, listeners: {}, changed: new Set()}) }
  get(key) { return this.values[key] }
  set(key, value) { if (this.values[key] !== value) { this.values[key] = value; this.changed.add(key) } }
  on(event, f) { (this.listeners[event] ||= new Set()).add(f) }
  off(event, f) { this.listeners[event]?.delete(f) }
  save_changes() {
    for (const key of this.changed) this.listeners[`change:${key}`]?.forEach(f => f())
    this.changed.clear()
    clearTimeout(this.timer)
    this.timer = setTimeout(() => history.replaceState(null, "", "#" + new URLSearchParams(this.kept.map(k => [k, this.values[k]]))), 150)
  }
  drawn() { document.documentElement.dataset.drawn = Number(document.documentElement.dataset.drawn || 0) + 1 }
  read(link) { // the state in a link, as far as it is valid
    const given = new URLSearchParams(link.slice(1)), types = {number: Number, boolean: v => v === "true", string: String}
    for (const k of this.kept) if (given.has(k)) {
      const v = types[typeof this.values[k]](given.get(k))
      if ((typeof v !== "number" || Number.isSafeInteger(v)) && (!this.values.choices[k] || this.values.choices[k].includes(v))) this.set(k, v)
    }
  }
}

const {trace, state, choices} = JSON.parse(document.getElementById("recorded").textContent)
const bytes = Uint8Array.from(atob(trace), c => c.charCodeAt(0))
const model = new Model({...state, choices, trace: new DataView(bytes.buffer)}, Object.keys(state))
model.read(location.hash)
addEventListener("hashchange", () => { model.read(location.hash); model.save_changes() })
document.querySelector("main").replaceChildren()
explorer.render({model, el: document.querySelector("main")})
