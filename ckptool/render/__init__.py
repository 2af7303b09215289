"""Reports as text, JSON and HTML: strings out of facts. Nothing here reads a file or prints."""
