"""An open device: its context, its memory and streams, and how they are freed even after an interrupt."""
