
// Commands to try get a button that copies them.

for (const node of document.querySelectorAll(".try")) node.parentNode.replaceWith(commandOf(node.textContent));
