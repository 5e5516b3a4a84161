"""Model shapes, hardware, and what each unit and stage costs."""
