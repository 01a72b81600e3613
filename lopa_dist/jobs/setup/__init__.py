"""From options to an engine on a device."""
