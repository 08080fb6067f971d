// Where the nodes of a draft tree are drawn. Depth goes to the right; each leaf has a line of its own, and a node
// stands on the line of its first child, so that a chain is straight.

// The nodes to draw, at most `most`: the path, then the most probable prefixes. A prefix-closed list, ascending.
export function chosen(tree, most) {
  const count = tree.parents.length;
  const kept = new Set([0, ...tree.path].filter((node) => node >= 0 && node < count));
  const weight = (node) => tree.logprobs?.[node] ?? -node;
  const others = [...Array(count).keys()].filter((node) => !kept.has(node));
  others.sort((one, other) => weight(other) - weight(one) || one - other);
  // A child's prefix is never more probable than its parent's, but ties and rounding may order them otherwise:
  // whole lineages are taken, or none of them.
  for (const node of others) {
    if (kept.size >= most) break;
    const lineage = [];
    for (let at = node; !kept.has(at); at = tree.parents[at]) lineage.push(at);
    if (kept.size + lineage.length <= most) lineage.forEach((at) => kept.add(at));
  }
  return [...kept].sort((one, other) => one - other);
}

// {places: Map node -> {column, line}, lines, columns}; the accepted child comes first.
export function placed(tree, nodes) {
  const path = new Set(tree.path);
  const children = new Map(nodes.map((node) => [node, []]));
  for (const node of nodes) if (node !== 0) children.get(tree.parents[node]).push(node);
  const places = new Map();
  let lines = 0;
  let columns = 0;
  const pending = [[0, 0, true]];
  while (pending.length) {
    const [node, column, first] = pending.pop();
    if (!first) lines += 1;
    places.set(node, { column, line: lines });
    columns = Math.max(columns, column + 1);
    const ordered = children.get(node).sort((one, other) => path.has(other) - path.has(one) || one - other);
    for (let index = ordered.length - 1; index >= 0; index--) pending.push([ordered[index], column + 1, index === 0]);
  }
  return { places, lines: lines + 1, columns };
}
