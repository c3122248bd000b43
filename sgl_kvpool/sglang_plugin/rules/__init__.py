"""What is refused at server start, and why."""
