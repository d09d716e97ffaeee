// One turn on the page: its text, as Markdown or token by token in the colour of its depth, and the figures of an answer.

import { markdown } from "./markdown.js";

const BANDS = 5; // as many as style.css has colours
const FIGURES_MS = 100; // between updates of the figures while tokens arrive

export class TurnView {
  constructor(role, title, coloured) {
    const turn = document.getElementById("turn").content.firstElementChild.cloneNode(true);
    turn.classList.add(role);
    this.element = turn;
    [this.heading, this.thoughts, this.body, this.figures, this.depths] = turn.children;
    this.heading.textContent = title;
    this.text = "";
    this.pieces = []; // of the text, and depths of its tokens
    this.plain = role === "user";
    this.inColour = coloured;
    this.layers = 0; // of the model: the first token always takes all of them
    this.counts = new Map(); // depth -> tokens
    this.pending = []; // depths of tokens whose text has not come: of the first bytes of a character
    this.tokens = 0;
    this.sent = performance.now();
    this.first = this.last = 0;
    this.shown = -Infinity;
  }

  /** Add text, and thoughts before it, whose tokens had `depths`; there are none where the server does not tell them. */
  add(text, depths = [], thoughts = "") {
    if (depths.length) this.layers = Math.max(this.layers, ...depths);
    this.pending.push(...depths);
    if (thoughts) this.thoughts.hidden = false;
    if (thoughts) this.thoughts.lastElementChild.append(this.piece(thoughts, this.pending.splice(0)));
    if (text) {
      this.pieces.push([text, this.pending.splice(0)]);
      if (this.inColour || this.plain) this.body.append(this.piece(...this.pieces.at(-1)));
    }
    this.text += text;
    for (const depth of depths) this.counts.set(depth, (this.counts.get(depth) ?? 0) + 1);
    this.tokens += depths.length || (text || thoughts ? 1 : 0);
    this.last = performance.now();
    this.first ||= this.last;
    if (this.last - this.shown > FIGURES_MS) this.show();
  }

  /** The answer has ended: show its figures, with those that only the server has. */
  end(note, usage) {
    if (usage) this.tokens = usage.completion_tokens;
    this.show(usage?.depth);
    if (note) this.figures.append(` · ${note}`);
    this.figures.hidden = !this.figures.textContent;
    this.depths.replaceChildren(...[...this.counts].sort(([a], [b]) => a - b).map(([depth, count]) => this.chip(depth, count)));
    this.depths.hidden = !this.counts.size;
  }

  /** Show the text anew, in colours of depth or as Markdown. */
  paint(coloured) {
    this.inColour = coloured;
    if (this.plain) return;
    this.body.classList.toggle("markdown", !coloured);
    this.body.replaceChildren(...(coloured ? this.pieces.map((piece) => this.piece(...piece)) : [markdown(this.text)]));
  }

  show(depth) {
    this.shown = this.last;
    if (!this.inColour) this.paint(false);
    const parts = this.tokens ? [plural(this.tokens, "token")] : [];
    const seconds = (this.last - this.first) / 1000;
    if (this.tokens > 1 && seconds > 0) parts.push(`${decimal((this.tokens - 1) / seconds)} tokens/s`);
    if (this.first) parts.push(`first after ${Math.round(this.first - this.sent)} ms`);
    if (depth?.layers_per_token) parts.push(`${decimal(depth.layers_per_token)} of ${this.layers} layers per token`);
    else if (this.counts.size) parts.push(`mean depth ${decimal(this.meanDepth())} of ${this.layers}`);
    const drafted = sum(depth?.drafted), accepted = sum(depth?.accepted);
    if (drafted) parts.push(`${accepted} of ${plural(drafted, "draft")} accepted`);
    this.figures.textContent = parts.join(" · ");
    this.figures.hidden = false;
  }

  piece(text, depths) {
    if (!depths.length) return text;
    const span = document.createElement("span");
    const depth = depths.reduce((a, b) => a + b) / depths.length; // some characters take several tokens
    span.className = `token ${this.band(depth)}`;
    span.title = depths.map((layers) => plural(layers, "layer")).join(", ");
    span.textContent = text;
    return span;
  }

  chip(depth, count) {
    const chip = document.createElement("span");
    chip.className = this.band(depth);
    chip.textContent = `${plural(depth, "layer")}: ${plural(count, "token")}`;
    return chip;
  }

  band(depth) {
    const layers = Math.max(this.layers, depth, 1);
    return `band-${Math.min(BANDS - 1, Math.floor((depth * BANDS) / layers))}`;
  }

  meanDepth() {
    let total = 0, tokens = 0;
    for (const [depth, count] of this.counts) {
      total += depth * count;
      tokens += count;
    }
    return total / tokens;
  }
}

function sum(counts) {
  return Object.values(counts ?? {}).reduce((a, b) => a + b, 0);
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

function decimal(value) {
  return value >= 100 ? Math.round(value).toString() : value.toFixed(1);
}
