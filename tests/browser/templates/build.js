/** Build a workflow on the page's own canvas from a Template's spec, and return it as ComfyUI would save it. */
async (spec) => {
  const [LEFT, TOP, ACROSS, DOWN, TITLE] = [40, 80, 60, 60, 30];
  const PICTURE = 340; // Load Image grows by the picture that it shows
  app.graph.clear();
  app.graph.id = crypto.randomUUID(); // ComfyUI remembers widgets' values by graph and node: else those of the last one come back
  const made = new Map();
  const add = (kind) => {
    const node = LiteGraph.createNode(kind);
    if (!node) throw new Error(`no node ${kind}`);
    app.graph.add(node);
    return node;
  };
  const note = add("MarkdownNote");
  note.title = "About this workflow";
  note.widgets[0].value = spec.note;
  const lines = spec.note.split("\n").reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / 44)), 0);
  note.pos = [LEFT - 400, TOP];
  note.size = [360, Math.min(760, 60 + 21 * lines)];
  for (const one of spec.nodes) {
    const node = add(one.kind);
    made.set(one.number, node);
    for (const [name, value] of Object.entries(one.widgets)) {
      const widget = node.widgets?.find((widget) => widget.name === name);
      if (!widget) throw new Error(`${one.kind} has no widget ${name}: ${node.widgets?.map((w) => w.name)}`);
      widget.value = value;
    }
    const seed = node.widgets?.find((widget) => widget.name === "control_after_generate");
    if (seed) seed.value = "fixed";
    if (one.title) node.title = one.title;
    if (one.models.length) node.properties.models = one.models;
  }
  for (const one of spec.nodes) {
    const node = made.get(one.number);
    for (const [name, [from, slot]] of Object.entries(one.links)) {
      const input = node.findInputSlot(name);
      if (input < 0) throw new Error(`${one.kind} has no input ${name}: ${node.inputs?.map((slot) => slot.name)}`);
      if (!made.get(from).connect(slot, node, input)) throw new Error(`${one.kind}.${name} takes no such link`);
    }
  }
  await new Promise((done) => setTimeout(done, 700)); // what CP Parallel Config says of its values has a height
  let x = LEFT;
  const last = Math.max(...spec.nodes.map((one) => one.column));
  for (let column = 0; column <= last; column++) {
    let y = TOP;
    let wide = 0;
    for (const one of spec.nodes.filter((one) => one.column === column)) {
      const node = made.get(one.number);
      const [width, height] = node.computeSize();
      const text = node.widgets?.some((widget) => widget.type === "customtext");
      const least = one.kind === "LoadImage" ? PICTURE : text ? 170 : 0;
      node.size = [Math.max(width, text ? 400 : 280), Math.max(height, least)];
      node.pos = [x, y];
      y += node.size[1] + TITLE + DOWN;
      wide = Math.max(wide, node.size[0]);
    }
    x += wide + ACROSS;
  }
  return JSON.parse(JSON.stringify(app.graph.serialize())); // without what is undefined
};
