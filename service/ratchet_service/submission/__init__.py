"""What a submission needs from the machine that checks it."""
