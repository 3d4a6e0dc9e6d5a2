"""What an answer is worth: references, scorers where they are exact, and a sandbox for programs."""
