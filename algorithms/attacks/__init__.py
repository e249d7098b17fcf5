"""What Byzantine clients send in place of their messages."""
