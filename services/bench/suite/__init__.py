"""`blockyard bench suite`: the figures that Blockyard is held to, each an item with its bar and its floor."""
