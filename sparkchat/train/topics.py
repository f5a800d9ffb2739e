"""Words that fill the prompt templates, by slot. Every eighth entry of a slot is reserved for evaluation."""


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.replace("\n", " ").split(","))


TOPICS: dict[str, tuple[str, ...]] = {
    "concept": _words(
        """photosynthesis, gravity, inflation, the water cycle, plate tectonics, black holes, DNA, vaccines, evolution,
        electricity, magnetism, the greenhouse effect, sound waves, rainbows, tides, volcanoes, earthquakes, the seasons,
        the food chain, natural selection, supply and demand, compound interest, democracy, the stock market, taxes,
        insurance, mortgages, credit scores, recursion, sorting algorithms, databases, the internet, encryption,
        machine learning, neural networks, cloud computing, operating systems, compilers, binary numbers, probability,
        fractions, prime numbers, the Pythagorean theorem, algebra, statistics, averages and medians, calculus,
        the scientific method, atoms and molecules, chemical reactions, acids and bases, the periodic table, friction,
        energy conservation, nuclear power, solar panels, wind turbines, batteries, jet engines, how planes fly, radar,
        GPS, the human heart, digestion, the immune system, sleep, memory, dreams, muscles, vision, hearing, allergies,
        antibiotics, viruses and bacteria, blood pressure, stress, habits, procrastination, empathy, cognitive bias,
        the placebo effect, culture shock, irony, metaphors, rhyme, haiku, perspective in painting, music theory, jazz,
        the Renaissance, the Industrial Revolution, the Roman Empire, ancient Egypt, the Silk Road, the Cold War,
        the printing press, the space race, human rights, the constitution, trade unions, globalization, urbanization,
        recycling, biodiversity, deforestation, coral reefs, deserts, glaciers, monsoons, hurricanes, the ozone layer,
        fermentation, pasteurization, baking powder, umami, entropy, relativity, quantum mechanics, light years,
        comets, the solar system, eclipses, the moon's phases, satellites, telescopes, microscopes, fossils, dinosaurs,
        migration of birds, camouflage, hibernation, pollination, symbiosis, ocean currents, hot springs, caves"""
    ),
    "audience": _words(
        """five-year-old, ten-year-old, high school student, complete beginner, curious adult, college freshman,
        busy manager, grandparent, new employee, tourist, science class, group of friends, sceptical reader, teacher"""
    ),
    "task": _words(
        """change a flat tire, cook rice, boil an egg, bake bread, make pancakes, brew coffee, plant tomatoes,
        train a puppy, clean a keyboard, remove a coffee stain, fold a fitted sheet, sew on a button, iron a shirt,
        paint a room, hang a picture, unclog a drain, sharpen a knife, pack a suitcase, plan a birthday party,
        write a resume, prepare for a job interview, ask for a raise, learn a new language, memorize a speech,
        read faster, take better notes, study for an exam, start a journal, meditate, fall asleep faster, wake up early,
        start running, do a push-up, lose weight safely, build muscle, stretch before exercise, swim freestyle,
        ride a bicycle, tie a tie, choose a bicycle, buy a used car, save money, make a budget, pay off debt,
        start a small business, sell things online, create a website, learn programming, back up a computer,
        make a strong password, set up a home network, take good photos, edit a video, record a podcast, play the guitar,
        draw a portrait, paint with watercolors, write a poem, write a short story, give a presentation, tell a joke,
        make new friends, apologize sincerely, handle criticism, say no politely, deal with a difficult coworker,
        care for a houseplant, grow herbs indoors, compost kitchen waste, set up an aquarium, groom a cat, build a birdhouse,
        camp in the rain, read a map, start a fire safely, tie a bowline knot, catch a fish, clean a bicycle chain,
        grow a beard, cut your own hair, whiten teeth at home, treat a small burn, choose running shoes, host a dinner,
        organize a closet, move to a new city, find an apartment, adopt a dog, plan a garden, preserve fruit"""
    ),
    "place": _words(
        """Paris, Tokyo, Rome, Egypt, Brazil, Canada, Iceland, Kenya, India, Mexico, Australia, Norway, Greece, Peru,
        Vietnam, Scotland, Morocco, New York, San Francisco, London, Berlin, Madrid, Istanbul, Bangkok, Singapore,
        Cape Town, Buenos Aires, Lisbon, Vienna, Prague, the Amazon rainforest, the Sahara, the Alps, the Grand Canyon,
        Antarctica, the Great Barrier Reef, a small village, the seaside, the mountains, a national park, Ireland, Chile,
        Kyoto, Amsterdam, Stockholm, Nairobi, Cairo, Montreal, Seoul, New Zealand, Portugal, Italy, the Netherlands"""
    ),
    "food": _words(
        """pasta, pizza, soup, salad, curry, tacos, sushi, fried rice, chocolate cake, apple pie, banana bread, omelette,
        pancakes, lentil stew, roast chicken, grilled vegetables, vegetable soup, hummus, burritos, ramen, risotto,
        cheese sandwich, potato salad, fruit salad, oatmeal, smoothies, meatballs, chili, dumplings, cookies, muffins,
        guacamole, lasagna, stir-fried noodles, mushroom sauce, garlic bread, lemonade, iced tea, hot chocolate, yogurt"""
    ),
    "animal": _words(
        """cat, dog, elephant, penguin, dolphin, owl, fox, turtle, rabbit, horse, octopus, bee, ant, spider, wolf, bear,
        tiger, lion, giraffe, kangaroo, koala, parrot, crow, eagle, frog, snake, whale, shark, seahorse, butterfly,
        hedgehog, squirrel, mouse, goat, sheep, cow, pig, duck, swan, camel, bat, otter, raccoon, panda, snail, crab"""
    ),
    "person": _words(
        """lonely lighthouse keeper, young wizard, retired detective, shy robot, brave little girl, old fisherman,
        clumsy knight, homesick astronaut, curious scientist, travelling musician, forgetful baker, honest thief,
        grumpy librarian, night-shift nurse, time traveller, lost tourist, talented chef, nervous student,
        street magician, clever shepherd, stubborn queen, tired superhero, kind dragon, jealous painter, mail carrier,
        young inventor, school janitor, deep-sea diver, forest ranger, wandering monk, taxi driver, toy maker,
        amateur astronomer, beekeeper, ghost who fears the dark, clockmaker, bus driver, rookie reporter, gardener"""
    ),
    "event": _words(
        """finds a mysterious letter, discovers a hidden door, learns to trust again, loses a precious ring,
        saves a village, makes an unlikely friend, gets lost in a storm, wins a strange contest, hears a secret,
        meets an old rival, returns home after many years, adopts a stray animal, solves an impossible puzzle,
        breaks an important promise, finds a map in the attic, receives a visit from the future, plants a magic seed,
        wakes up in a different city, misses the last train, builds a boat, faces their biggest fear, tells the truth,
        repairs a broken clock, opens a small cafe, climbs a mountain, forgets their own name, sings for the first time"""
    ),
    "profession": _words(
        """teacher, nurse, doctor, engineer, lawyer, chef, farmer, pilot, journalist, architect, electrician, plumber,
        carpenter, firefighter, police officer, librarian, software developer, data analyst, accountant, designer,
        photographer, musician, actor, scientist, veterinarian, dentist, pharmacist, translator, tour guide, mechanic,
        barista, waiter, salesperson, real estate agent, personal trainer, social worker, psychologist, researcher"""
    ),
    "hobby": _words(
        """photography, gardening, chess, knitting, hiking, cycling, swimming, painting, drawing, cooking, baking, reading,
        writing, playing the piano, playing the guitar, singing, dancing, yoga, running, fishing, birdwatching, camping,
        collecting stamps, board games, video games, woodworking, pottery, calligraphy, astronomy, learning languages,
        volunteering, travelling, climbing, skating, surfing, martial arts, model trains, origami, podcasts, crosswords"""
    ),
    "product": _words(
        """reusable water bottle, wireless headphones, electric bike, coffee machine, hiking backpack, desk lamp,
        fitness tracker, standing desk, board game, cookbook, scented candle, smart thermostat, dog leash, yoga mat,
        phone case, robot vacuum, garden tool set, kitchen scale, rain jacket, sleeping bag, notebook, fountain pen,
        language app, meal kit, houseplant subscription, toy robot, picture frame, portable speaker, umbrella, sneakers"""
    ),
    "quality": _words(
        """patience, honesty, courage, kindness, curiosity, humility, discipline, creativity, loyalty, gratitude,
        confidence, leadership, teamwork, resilience, generosity, punctuality, humor, tolerance, ambition, self-control"""
    ),
    "feeling": _words(
        """stressed about work, lonely, bored, anxious about an exam, sad after a breakup, tired all the time,
        angry with my brother, nervous about moving, overwhelmed by chores, unmotivated, worried about money, proud,
        homesick, jealous of a friend, excited about a trip, guilty about a mistake, shy at parties, stuck in my career,
        disappointed with my grades, afraid of flying, unsure about my future, frustrated with my roommate"""
    ),
    "issue": _words(
        """social media, remote work, electric cars, online shopping, homework, school uniforms, fast food, video games,
        public transport, nuclear energy, space exploration, zoos, artificial intelligence, cash payments, tourism,
        a four-day work week, vegetarian diets, working from home, living in a big city, owning a pet, renting a home,
        learning online, reading paper books, getting up early, keeping a diary, team sports, studying abroad,
        electric scooters, self-driving cars, universal basic income, free museums, plastic bags, smartphones in class"""
    ),
    "pair": _lines(
        """cats and dogs
        tea and coffee
        trains and planes
        books and movies
        summer and winter
        cities and villages
        viruses and bacteria
        weather and climate
        speed and velocity
        mass and weight
        fruits and vegetables
        crocodiles and alligators
        a list and a tuple in Python
        HTML and CSS
        RAM and storage
        HTTP and HTTPS
        a stack and a queue
        Java and JavaScript
        a novel and a short story
        a simile and a metaphor
        running and walking
        solar and wind energy
        renting and buying a house
        a debit card and a credit card
        stocks and bonds
        the Arctic and the Antarctic
        stars and planets
        moths and butterflies
        a violin and a viola
        football and rugby
        yoga and pilates
        frogs and toads"""
    ),
    "relation": _words(
        """boss, coworker, landlord, teacher, neighbor, customer, friend, aunt, client, professor, team, hotel,
        former colleague, doctor's office, bank, school, new employee, supplier"""
    ),
    "purpose": _lines(
        """asking for a day off
        thanking them for their help
        apologizing for a late reply
        rescheduling a meeting
        inviting them to a barbecue
        asking for feedback on a report
        complaining about noise
        confirming an appointment
        announcing a new project
        asking for an extension
        introducing yourself
        declining an invitation
        reporting a broken heater
        requesting a refund
        congratulating them on a promotion
        asking for a recommendation letter
        saying goodbye on your last day
        reminding them about a payment
        sharing good news
        asking a question about an invoice
        offering to help with moving
        asking to borrow a ladder
        reporting a lost package"""
    ),
    "code": _lines(
        """counts the words in a text file
        removes duplicates from a list while keeping the order
        converts temperatures between Celsius and Fahrenheit
        draws a triangle of stars
        rolls two dice and prints the sum
        prints a multiplication table
        finds the longest word in a sentence
        checks whether a number is even
        reverses the words of a sentence
        computes the average of a list of grades
        simulates a coin toss
        generates a random password
        groups a list of names by first letter
        reads a CSV file and prints the first column
        counts vowels in a string
        merges two dictionaries
        prints the days until a given date
        sorts a list of people by age
        plays a number guessing game
        keeps a simple to-do list
        prints a calendar for a month
        converts kilometers to miles
        checks whether a year is a leap year
        finds the second largest number in a list
        removes all punctuation from a text
        models a bank account with deposits and withdrawals
        stores books in a small library class
        draws a bar chart of monthly sales
        counts how often each letter appears
        capitalizes the first letter of every word
        downloads a web page and prints its title
        computes the area of a circle"""
    ),
    "language": _words("""Python, Python, Python, JavaScript, Java, C, Go, Ruby, Rust, TypeScript, SQL, Bash"""),
    "tongue": _words("""French, Spanish, German, Italian, Portuguese, Dutch, Swedish, Latin"""),
    "sentence": _lines(
        """The meeting was moved because nobody could find the room.
        I would like to know when the package will arrive.
        She go to the market yesterday and buyed three apple.
        The weather was bad so we stayed at home and watched films.
        Due to the fact that it was raining, we made the decision to cancel.
        Him and me was late for the train again.
        The restaurant is nice but the service is very slow.
        I can't come to your party, sorry.
        Our team worked hard and finished the project before the deadline.
        The old house on the hill has been empty for years.
        You need to send me the report right now.
        We was very happy when we seen the results.
        My phone broke and I need a new one soon.
        The dog barked at the mailman every single morning.
        Learning to cook saved me a lot of money.
        There are many reasons why people like to travel.
        The movie was boring and too long.
        He don't know nothing about computers.
        Please be informed that the office will be closed on Friday.
        The children played in the garden until it got dark.
        I have a lot of work to do and not enough time.
        The new law will affect small shops in the city.
        Thank you for your message, I will think about it.
        It is important that everyone washes their hands."""
    ),
    "passage": _lines(
        """The town library opened a repair corner last month. Volunteers help people fix lamps, toys and clothes. So far they have repaired over two hundred items, and the waiting list keeps growing.
        Honeybees communicate through movement. A bee that finds flowers returns to the hive and dances; the angle of the dance shows the direction and its length shows the distance.
        Our street used to be noisy. Then the city planted trees, narrowed the road and added benches. Traffic slowed down, children started to play outside, and two cafes opened.
        Salt was once so valuable that it was traded across deserts. Today it is cheap, but it still matters in cooking, in preserving food and in many factories.
        Maria wanted to learn the violin at sixty. Her family laughed at first. Three years later she played at her granddaughter's wedding, and everyone cried.
        The company tested a shorter work week for six months. Output stayed the same, sick days fell by a third, and most employees said that they slept better.
        A glacier moves slowly, but it shapes the land. It grinds rock into powder, carves valleys, and leaves behind lakes and piles of stones when it melts.
        Tea came to Europe by ship. At first only the rich could afford it. As prices fell, it became an everyday drink, and afternoon tea turned into a habit.
        The bridge was closed after an inspection found cracks. Engineers expect repairs to take four months. Buses will use the tunnel, and cyclists can take the free ferry.
        Sleep is not wasted time. While we sleep, the brain sorts memories, the body repairs tissue, and the immune system prepares for the next day.
        Olive trees can live for more than a thousand years. They need little water, survive fires, and grow new shoots from old roots.
        The school garden began with six pots. Now pupils grow beans, carrots and sunflowers, sell them at a stall, and use the money for books.
        Lightning is a giant spark. It heats the air so quickly that the air explodes, and that explosion is the thunder we hear a little later.
        When the power failed, the neighbors met on the stairs with candles. Somebody brought a guitar, somebody else brought soup, and nobody wanted the lights back.
        Paper was invented in China about two thousand years ago. It spread slowly along trade routes, and replaced parchment because it was cheaper.
        The team lost its first five matches. The coach changed the training, asked the players for ideas, and let the youngest one lead. They finished second."""
    ),
    "history": _words(
        """the wheel, paper money, the telephone, the bicycle, chocolate, coffee, the Olympic Games, chess, the calendar,
        photography, the light bulb, the sewing machine, the piano, soap, glass, the railway, the newspaper, umbrellas,
        the pencil, the computer, maps, libraries, bread, the clock, cinema, radio, the zipper, ice cream, postage stamps"""
    ),
    "gift": _words(
        """my mother, a ten-year-old boy, my best friend, a colleague, a teenager, my grandfather, a newborn's parents,
        a coffee lover, someone who likes cooking, a runner, my girlfriend, a teacher, a neighbor, a book lover"""
    ),
    "character": _words(
        """pirate captain, medieval king, friendly alien, strict librarian, wise old tree, detective, tour guide, chef,
        fortune teller, robot butler, sports coach, weather presenter, ship's cat, museum guard, talking mirror,
        knight, space explorer, shopkeeper, journalist, garden gnome"""
    ),
    "opener": _lines(
        """Hi!
        Hello, how are you today?
        Good morning!
        Hey, can you help me with something?
        What can you do?
        Who are you?
        Tell me something interesting.
        I'm bored, entertain me.
        Can we talk?
        What's up?
        Good evening! I need some advice.
        Do you like music?
        What should I do this weekend?
        Can you tell me a joke?
        I had a terrible day.
        I can't sleep.
        What is your favorite color?
        Are you a human?
        Thanks for your help yesterday!
        Let's play a game.
        Ask me a question.
        I need motivation.
        How do you work?
        What is the meaning of life?"""
    ),
    "count": _words("three, five, seven, ten, four, six, eight, two"),
    "size": _lines(
        """in one sentence
        in two sentences
        in a short paragraph
        in simple words
        step by step
        with an example
        in detail
        briefly
        with bullet points
        in about 100 words"""
    ),
    "tone": _words("formal, friendly, funny, polite, dramatic, simple, poetic, confident, casual, cheerful"),
}
