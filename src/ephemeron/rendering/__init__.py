"""Pages and pictures: SVG elements, tables, and a self-contained HTML page. Text in, markup out."""
