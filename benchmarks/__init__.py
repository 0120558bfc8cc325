"""One script a question; each writes a CSV under results/, from which render.py makes the README's tables."""
