// On the site, an HTML page keeps the scheme that the reader chose there. The theme stores it.
try {
  const key = Object.keys(localStorage).find((name) => name.endsWith(".__palette"));
  const { media, scheme } = JSON.parse(localStorage[key]).color;
  if (media !== "(prefers-color-scheme)") {
    document.documentElement.style.colorScheme = scheme === "slate" ? "dark" : "light";
  }
} catch { /* nothing was chosen, or the browser forbids it, as for some files */ }
