"""Trees into trees; nothing here reads tensor data until it is asked for."""
