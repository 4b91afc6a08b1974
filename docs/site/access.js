/* What the theme leaves out for keyboards and screen readers: what scrolls sideways can be focused, and then scrolled
   with arrow keys; the search has a name; neither a listing's buttons nor each level of the contents are a landmark. */
const scrolls = new ResizeObserver((seen) => {
  for (const { target } of seen) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
document$.subscribe(() => {
  document.querySelector(".md-search").ariaLabel = "Search";
  for (const nav of document.querySelectorAll(".md-nav--secondary .md-nav, .md-code__nav")) {
    nav.removeAttribute("aria-label");
    nav.role = "none";
  }
  const boxes = ".md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset p:has(> img.wide)";
  for (const box of document.querySelectorAll(boxes)) scrolls.observe(box);
});
