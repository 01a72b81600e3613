"""What is generated and how it is judged."""
