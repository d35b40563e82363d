"""What a function runs. Imports neither planning nor faces: cold starts are paid for."""
