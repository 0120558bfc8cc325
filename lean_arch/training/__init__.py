"""The one loop that trains every architecture, its data, optimisers and files."""
