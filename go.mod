module petiole

go 1.26
