// Markdown as nodes of the page. What a model writes becomes text nodes only, so that nothing of it is markup or a script.

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^\s*>\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const COLUMNS = /^\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?)?\s*$/; // the line below a table's headings
const LONGEST = "{1,2000}?"; // characters of a span: an answer full of asterisks must not stop the page
const SPAN = new RegExp(
  [
    String.raw`\\([\\*_#|>~` + "`])", // an escaped character
    "(`+)([^`]|[^`][\\s\\S]" + LONGEST + "[^`])\\2(?!`)",
    String.raw`\*\*(?=\S)([\s\S]${LONGEST})\*\*`,
    String.raw`\*(?=[^\s*])([^*]${LONGEST})\*`,
    String.raw`(?<!\w)_(?=[^\s_])([^_]${LONGEST})_(?!\w)`,
    String.raw`\[([^\]\n]{1,500})\]\((https?:[^\s)]{1,2000})\)`,
  ].join("|"),
);

/** `text` as a fragment: headings, lists, quotes, tables, code with a button that copies it, and spans in a line. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  addBlocks(text.split("\n"), fragment);
  return fragment;
}

function addBlocks(lines, into) {
  while (lines.length) {
    const line = lines[0];
    if (!line.trim()) lines.shift();
    else if (FENCE.test(line)) into.append(code(lines));
    else if (HEADING.test(line)) {
      const [, marks, title] = lines.shift().match(HEADING);
      into.append(spans(title, `h${Math.min(6, marks.length + 3)}`)); // a turn's own heading is h3
    } else if (RULE.test(line)) into.append(lines.shift() && node("hr"));
    else if (QUOTE.test(line)) {
      const quote = node("blockquote");
      addBlocks(taken(lines, (next) => QUOTE.test(next)).map((next) => next.replace(QUOTE, "")), quote);
      into.append(quote);
    } else if (ITEM.test(line)) into.append(list(lines));
    else if (COLUMNS.test(lines[1] ?? "") && line.includes("|")) into.append(table(lines));
    else into.append(spans([lines.shift(), ...taken(lines, isText)].join("\n"), "p"));
  }
}

const isText = (line) => line.trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((begin) => begin.test(line));

/** Remove the first lines that `belongs` holds for, and return them. */
function taken(lines, belongs) {
  const end = lines.findIndex((line) => !belongs(line));
  return lines.splice(0, end < 0 ? lines.length : end);
}

function code(lines) {
  const [, fence, language] = lines.shift().match(FENCE);
  const text = taken(lines, (line) => !(line.trim().startsWith(fence) && !line.trim().slice(fence.length).trim())).join("\n");
  lines.shift(); // the closing fence
  const block = node("div"), head = node("p", language);
  block.className = "code";
  if (navigator.clipboard) { // in a secure context only, as localhost is
    const copy = node("button", "Copy");
    copy.type = "button";
    copy.className = "plain";
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    });
    head.append(copy);
  }
  const pre = node("pre");
  pre.append(node("code", text));
  block.append(head, pre);
  return block;
}

function list(lines) {
  const [, indent, mark] = lines[0].match(ITEM);
  const ordered = /\d/.test(mark), items = node(ordered ? "ol" : "ul");
  if (ordered) items.start = parseInt(mark);
  const width = (line) => line.match(/^\s*/)[0].length;
  const isNext = (line) => width(line) <= indent.length + 1 && ITEM.test(line) && /\d/.test(line.match(ITEM)[2]) === ordered;
  while (lines.length && isNext(lines[0])) {
    const inner = lines[0].match(ITEM)[0].length, item = node("li");
    const first = lines.shift().slice(inner);
    const rest = taken(lines, (line) => !isNext(line) && (!line.trim() || width(line) > indent.length));
    addBlocks([first, ...rest.map((line) => line.slice(Math.min(inner, width(line))))], item);
    items.append(item);
  }
  return items;
}

function table(lines) {
  const rows = [lines.shift(), ...(lines.shift(), taken(lines, (line) => line.includes("|")))];
  const whole = node("table");
  rows.forEach((row, i) => {
    const cells = row.trim().replace(/^\||\|$/g, "").split("|");
    whole.insertRow().append(...cells.map((cell) => spans(cell.trim(), i ? "td" : "th")));
  });
  return whole;
}

/** A node of `name` with the spans of `text`. */
function spans(text, name) {
  const parent = node(name);
  for (let found; (found = text.match(SPAN)); text = text.slice(found.index + found[0].length)) {
    const [, escaped, , quoted, strong, emphasis, other, label, url] = found;
    parent.append(text.slice(0, found.index));
    if (escaped) parent.append(escaped);
    else if (quoted) parent.append(node("code", quoted));
    else if (strong) parent.append(spans(strong, "strong"));
    else if (emphasis ?? other) parent.append(spans(emphasis ?? other, "em"));
    else {
      const link = spans(label, "a");
      Object.assign(link, { href: url, target: "_blank", rel: "noopener noreferrer" });
      parent.append(link);
    }
  }
  parent.append(text);
  return parent;
}

function node(name, text = "") {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
