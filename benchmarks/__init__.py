"""What is measured, as programs that print tables and write JSON and figures."""
