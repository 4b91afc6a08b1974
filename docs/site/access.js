/* For keyboards and screen readers, what the theme leaves out: what scrolls sideways can be focused, and then scrolled
   with arrow keys; the search and the buttons of a listing have names. */
const scrolls = new ResizeObserver((seen) => {
  for (const { target } of seen) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
document$.subscribe(() => {
  document.querySelector(".md-search").ariaLabel = "Search";
  document.querySelectorAll(".md-code__nav").forEach((nav, i) => (nav.ariaLabel = `Listing ${i + 1}`));
  const boxes = ".md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset p:has(> img.wide)";
  for (const box of document.querySelectorAll(boxes)) scrolls.observe(box);
});
